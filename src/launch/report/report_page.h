#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "launch/report/comparison.h"

namespace torchspan::launch {

/// Encodes a run for the report's script as JSON that may stand in an HTML script element: times in
/// nanoseconds, spans as columns with differences. At most `most_spans` spans, the longest. `comparison` with an earlier
/// run may be null.
std::string encode_report(const TraceSet& set, const RunFigures& figures, std::size_t most_spans,
                          const RunComparison* comparison = nullptr);

/// The parts of the page, from src/launch/report/page.
struct ReportAssets {
  std::string_view page, style, script;
};
ReportAssets report_assets();

/// Returns one HTML page that shows `data` (of encode_report()) and loads nothing. Its policy lets run only its own
/// script and style.
std::string make_report_page(std::string_view data);

}  // namespace torchspan::launch
