#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "launch/trace/trace_set.h"

namespace torchspan::launch {

/// "calls", "handlers", …: the plural under which spans of a kind are shown.
std::string_view kind_title(SpanKind kind);

/// A row of a worker on which spans nest or follow each other, and never overlap otherwise.
struct Track {
  std::string title;
  int order = 0;                   ///< position among the worker's tracks
  std::vector<std::size_t> spans;  ///< indices into the trace's spans: by beginning, longer ones first
};

/// The rows of one worker. Scopes are on the row of their thread; other spans share as few rows per kind as
/// possible.
struct Tracks {
  std::vector<Track> tracks;
  std::vector<std::size_t> without_track;  ///< spans for which a kind has no row left
};

/// Distributes all spans of a trace. At most `most_rows` rows for a kind.
Tracks make_tracks(const TraceContents& trace, std::size_t most_rows = 32);

}  // namespace torchspan::launch
