#include "launch/watch/top_view.h"

#include <algorithm>
#include <fmt/format.h>

#include "launch/report/verdict.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {
namespace {

/// The operation or call of a worker that has lasted longest.
std::string oldest_wait(const WorkerReport& worker) {
  if (!worker.answers) return worker.trouble.empty() ? "does not answer" : worker.trouble;
  double longest = 0;
  std::string text;
  const auto consider = [&](double seconds, std::string what) {
    if (seconds <= longest) return;
    longest = seconds;
    text = fmt::format("{}  {:.1f} s", what, seconds);
  };
  for (const auto& operation : worker.open) consider(operation.seconds, operation.name);
  for (const auto& call : worker.pending)
    consider(call.seconds, fmt::format("'{}' on {}", call.name, call.peer));
  for (const auto& call : worker.serving)
    consider(call.seconds, fmt::format("serves '{}' for {}", call.name, call.peer));
  return text;
}

}  // namespace

std::string TopView::show(const std::vector<WorkerReport>& workers, Duration elapsed) {
  const double seconds = std::max(to_seconds(elapsed), 1e-3);
  const bool several = std::ranges::any_of(workers, [](const auto& worker) { return worker.node >= 0; });
  const auto host_of = [several](const WorkerReport& worker) {
    return several ? fmt::format("  {:<16}", name_of_host(worker.node, worker.host)) : "";
  };
  std::string text = fmt::format("{:>4}{}  {:<16} {:>8} {:>5} {:>6} {:>10} {:>9}  {}\n", "rank",
                                 several ? fmt::format("  {:<16}", "host") : "", "worker", "pid", "state", "cpu", "memory", "calls/s", "longest operation");
  for (const WorkerReport& worker : workers) {
    const auto before = previous_.find(worker.rank);
    const bool same = before != previous_.end() && before->second.process == worker.process && worker.answers;
    const double processor = same ? worker.processor_seconds - before->second.processor_seconds : 0;
    const double calls =
        same ? static_cast<double>(worker.calls_sent) - static_cast<double>(before->second.calls_sent) : 0;
    text += fmt::format("{:>4}{}  {:<16} {:>8} {:>5} {:>6} {:>10} {:>9}  {}\n", worker.rank, host_of(worker),
                        worker.name, worker.process, worker.process_state,
                        same ? fmt::format("{:.0f} %", 100 * processor / seconds) : "-",
                        format_bytes(worker.resident_bytes),
                        same ? fmt::format("{:.0f}", calls / seconds) : "-", oldest_wait(worker));
    previous_[worker.rank] = worker;
  }
  return text;
}

}  // namespace torchspan::launch
