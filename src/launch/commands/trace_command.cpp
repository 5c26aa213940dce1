#include "launch/commands/trace_command.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <optional>
#include <sstream>

#include <torchspan/core/error.h>

#include "launch/report/report_page.h"
#include "launch/report/verdict.h"
#include "launch/trace/chrome_json.h"
#include "launch/trace/profiles.h"
#include "launch/trace/trace_set.h"
#include "launch/whole_file.h"

namespace torchspan::launch {
namespace {

void write_result(const std::string& path, const std::string& contents) {
  const std::string problem = write_whole_file(path, contents);
  if (!problem.empty()) throw_invalid(fmt::format("--out {} cannot be written: {}", path, problem));
}

}  // namespace

void describe_trace_options(CLI::App& command, TraceOptions& options) {
  command
      .add_option("folder", options.folder,
                  "Folder with the workers' *.trace files, and profiles of LibTorch (*.json)")
      ->required();
  command.add_option("-o,--out", options.out, "File to write: JSON that ui.perfetto.dev opens")->required();
  command
      .add_option("--max-spans", options.most_spans,
                  "Write at most this many spans, the longest ones; Perfetto holds a few million")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}));
}

void describe_report_options(CLI::App& command, ReportOptions& options) {
  command.add_option("folder", options.folder, "Folder with the workers' *.trace files")->required();
  command.add_option("-o,--out", options.out, "File to write: an HTML page that any browser opens")
      ->required();
  command.add_option("--compare", options.earlier,
                     "Folder with the traces of an earlier run, with which the page compares this one");
  command.add_option("--max-spans", options.most_spans, "Draw at most this many spans, the longest ones")
      ->check(CLI::Range(std::size_t{1}, std::size_t{10'000'000}));
}

std::string make_report(const ReportOptions& options) {
  const TraceSet set = read_traces(options.folder);
  const RunFigures figures = examine_run(set);
  std::optional<RunComparison> comparison;
  if (!options.earlier.empty()) {
    const TraceSet earlier = read_traces(options.earlier);
    comparison = compare_runs(earlier, examine_run(earlier), set, figures);
  }
  write_result(options.out, make_report_page(encode_report(set, figures, options.most_spans,
                                                           comparison ? &*comparison : nullptr)));
  std::string text =
      fmt::format("{}: {} worker{}, {}\n", options.out, set.workers.size(),
                  set.workers.size() == 1 ? "" : "s", format_time(static_cast<double>(set.length)));
  const std::vector<RunFinding> findings = judge_run(set, figures);
  if (findings.empty())
    text += "No wait takes 5 % of the time of any rank: the run is limited by its computation.\n";
  for (const RunFinding& finding : findings) {
    text += fmt::format("{:3.0f} %  {}\n", 100 * finding.share, finding.text);
    if (!finding.advice.empty()) text += fmt::format("       {}\n", finding.advice);
  }
  for (const std::string& note : set.notes) text += fmt::format("note: {}\n", note);
  if (comparison) text += describe_comparison(*comparison);
  return text;
}

std::string merge_traces(const TraceOptions& options) {
  TraceSet set = read_traces(options.folder);
  attach_profiles(read_profiles(options.folder), set);
  std::ostringstream json;
  const ChromeJsonReport report = write_chrome_json(set, json, options.most_spans);
  write_result(options.out, json.str());
  std::string text =
      fmt::format("{}: {} spans{} of {} worker{}, {} arrows, {:.3f} s; open it at https://ui.perfetto.dev\n",
                  options.out, report.spans,
                  report.profiler_events == 0
                      ? std::string()
                      : fmt::format(" and {} events of LibTorch's profiler", report.profiler_events),
                  set.workers.size(), set.workers.size() == 1 ? "" : "s", report.arrows,
                  static_cast<double>(set.length) / 1e9);
  if (report.left_out > 0) {
    text += fmt::format("note: {} spans shorter than {:.1f} us are left out (--max-spans)\n", report.left_out,
                        static_cast<double>(report.shortest) / 1e3);
  }
  for (const WorkerTrace& worker : set.workers) {
    if (!worker.other_host) continue;
    text += fmt::format("note: times of rank {} ({}) are off by at most {:.0f} us\n", worker.rank(),
                        worker.contents.identity.host, worker.clock_error / 1e3);
  }
  for (const std::string& note : set.notes) text += fmt::format("note: {}\n", note);
  return text;
}

}  // namespace torchspan::launch
