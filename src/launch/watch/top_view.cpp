#include "launch/watch/top_view.h"

#include <algorithm>
#include <fmt/format.h>

#include "launch/report/verdict.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {
namespace {

constexpr std::size_t kMostFlows = 10;

/// The operation or call of a worker that has lasted longest. A span of the program counts only if nothing began inside it:
/// else it would hide what the worker does in it.
std::string oldest_wait(const WorkerReport& worker) {
  if (!worker.answers) return worker.trouble.empty() ? "does not answer" : worker.trouble;
  double longest = 0;
  std::string text;
  const auto consider = [&](double seconds, std::string what) {
    if (seconds <= longest) return;
    longest = seconds;
    text = fmt::format("{}  {:.1f} s", what, seconds);
  };
  for (const auto& operation : worker.open) {
    if (operation.kind == "user" && &operation != &worker.open.back()) continue;
    consider(operation.seconds, operation.name);
  }
  for (const auto& call : worker.pending)
    consider(call.seconds, fmt::format("'{}' on {}", call.name, call.peer));
  for (const auto& call : worker.serving)
    consider(call.seconds, fmt::format("serves '{}' for {}", call.name, call.peer));
  return text;
}

/// One line with the largest flows of calls and replies between ranks; empty if there were none.
std::string describe_traffic(const std::vector<WorkerReport>& workers) {
  struct Flow {
    std::uint64_t bytes;
    int from, to;
  };
  std::vector<Flow> flows;
  for (const WorkerReport& worker : workers) {
    for (const auto& [from, bytes] : worker.received) {
      if (from != worker.rank && bytes > 0) flows.push_back({bytes, from, worker.rank});
    }
  }
  std::ranges::sort(flows, std::greater(), &Flow::bytes);
  std::string text;
  for (std::size_t i = 0; i < std::min(flows.size(), kMostFlows); ++i) {
    text += fmt::format("{}{}→{} {}/s", i == 0 ? "bytes of calls and replies: " : ", ", flows[i].from,
                        flows[i].to, format_bytes(flows[i].bytes));
  }
  if (flows.size() > kMostFlows) text += fmt::format(", and {} more", flows.size() - kMostFlows);
  return text.empty() ? "" : text + "\n";
}

}  // namespace

std::string TopView::show(const std::vector<WorkerReport>& workers, Duration elapsed) {
  const double seconds = std::max(to_seconds(elapsed), 1e-3);
  const bool several = std::ranges::any_of(workers, [](const auto& worker) { return worker.node >= 0; });
  const auto host_of = [several](const std::string& host) {
    return several ? fmt::format("  {:<16}", host) : "";
  };
  std::string text =
      fmt::format("{:>4}{}  {:<16} {:>8} {:>5} {:>6} {:>10} {:>9} {:>6} {:>6} {:>6} {:>6}  {}\n", "rank",
                  host_of("host"), "worker", "pid", "state", "cpu", "memory", "calls/s", "calls", "serves",
                  "queued", "rrefs", "longest operation");
  for (const WorkerReport& worker : workers) {
    const auto before = previous_.find(worker.rank);
    const bool same = before != previous_.end() && before->second.process == worker.process && worker.answers;
    const double processor = same ? worker.processor_seconds - before->second.processor_seconds : 0;
    const double calls =
        same ? static_cast<double>(worker.calls_sent) - static_cast<double>(before->second.calls_sent) : 0;
    const auto known = [&](std::string value) {
      return worker.answers ? std::move(value) : std::string("-");
    };
    text += fmt::format(
        "{:>4}{}  {:<16} {:>8} {:>5} {:>6} {:>10} {:>9} {:>6} {:>6} {:>6} {:>6}  {}\n", worker.rank,
        host_of(name_of_host(worker.node, worker.host)), worker.name,
        worker.process == 0 ? "-" : std::to_string(worker.process),
        worker.process_state == '?' ? '-' : worker.process_state,
        same ? fmt::format("{:.0f} %", 100 * processor / seconds) : "-",
        known(format_bytes(worker.resident_bytes)), same ? fmt::format("{:.0f}", calls / seconds) : "-",
        known(std::to_string(worker.pending.size())), known(std::to_string(worker.serving.size())),
        known(std::to_string(worker.queued)), known(std::to_string(worker.references)), oldest_wait(worker));
    previous_[worker.rank] = worker;
  }
  return text + describe_traffic(workers);
}

}  // namespace torchspan::launch
