#pragma once
#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace torchspan::launch {

/// The request of `torchspan trace`.
struct TraceOptions {
  std::string folder;
  std::string out;  ///< file
  std::uint64_t most_spans = 1'000'000;
};

/// The request of `torchspan report`.
struct ReportOptions {
  std::string folder;
  std::string out;                   ///< file
  std::string earlier;               ///< folder of the run to compare with; empty: none
  std::size_t most_spans = 120'000;  ///< in the timeline
};

/// Declares the options on `command`, which writes to `options` when it parses.
void describe_trace_options(CLI::App& command, TraceOptions& options);

/// Merges the workers' traces into one JSON file and returns what to print. Throws Error{kInvalid} that names
/// the file or the worker at fault.
std::string merge_traces(const TraceOptions& options);

void describe_report_options(CLI::App& command, ReportOptions& options);

/// Writes the report of a run as one HTML page and returns its findings as text. Throws as merge_traces().
std::string make_report(const ReportOptions& options);

}  // namespace torchspan::launch
