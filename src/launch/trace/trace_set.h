#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/api/trace_format.h"
#include "launch/trace/clock_fit.h"
#include "launch/trace/profiler_file.h"

namespace torchspan::launch {

/// The trace of one worker; its times are nanoseconds since TraceSet::base.
struct WorkerTrace {
  TraceContents contents;
  double clock_error = 0;  ///< bound in nanoseconds; 0 on the reference's host
  bool other_host = false;
  ClockLine clock;                      ///< against the reference's, if this is another host
  std::vector<ProfilerTrace> profiles;  ///< of LibTorch's profiler; see attach_profiles()

  int rank() const { return contents.identity.rank; }
  const std::string& name_of(const StoredSpan& span) const { return contents.names[span.name]; }
};

/// The traces of one run on one time scale.
struct TraceSet {
  std::vector<WorkerTrace> workers;  ///< by rank
  std::int64_t base = 0;             ///< of the reference clock: the beginning of the first span
  std::int64_t unix_base = 0;        ///< the same moment, since 1970
  std::int64_t length = 0;           ///< to the end of the last span
  std::vector<std::string> notes;    ///< what a reader must know: missing workers, lost spans
};

/// Puts the traces of one run on the clock of the lowest rank. Traces of other runs, earlier attempts and
/// replaced processes are left out, with a note. Throws Error{kInvalid} if there is none, or if a worker's clock
/// cannot be compared with the reference's.
TraceSet align_traces(std::vector<TraceContents> traces);

/// Moves the base, by which all times of the set change. `by` is negative for an earlier base.
void move_base(TraceSet& set, std::int64_t by);

/// Reads all *.trace files of `folder` and aligns them. Throws Error{kInvalid} that names the file.
TraceSet read_traces(const std::string& folder);

}  // namespace torchspan::launch
