#include "launch/watch/diagnosis.h"

#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/api/step_part.h"
#include "launch/display/board.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {
namespace {

/// Up to this many workers, all ranges are tried.
constexpr int kMostTried = 32;

std::vector<int> every_nth(int step, int first, int end) {
  std::vector<int> ranks;
  for (int rank = first; rank < end; rank += step) ranks.push_back(rank);
  return ranks;
}

/// The ranks first, first + step, … below some end whose group may have this number; empty if there are none.
std::vector<int> find_ranks(int number, int world) {
  if (has_ranks(number, every_nth(1, 0, world))) return every_nth(1, 0, world);
  for (int step = 1; step < std::min(world, kMostTried); ++step) {
    for (int first = 0; first < world; ++first) {
      for (int end = first + 1; end <= world; end += step) {
        if (has_ranks(number, every_nth(step, first, end))) return every_nth(step, first, end);
      }
    }
    if (world > kMostTried) break;
  }
  return {};
}

bool is_seen_in(const WorkerReport& worker, int number) {
  const auto of_group = [number](const WorkerReport::Operation& operation) {
    return (operation.kind == "collective" || operation.kind == "wait" || operation.kind == "message") &&
           operation.part == number;
  };
  return std::any_of(worker.open.begin(), worker.open.end(), of_group) ||
         std::any_of(worker.ended.begin(), worker.ended.end(), of_group);
}

}  // namespace

std::set<int> members_of_group(int number, const std::vector<WorkerReport>& workers) {
  std::set<int> present, members;
  int world = 0;
  for (const WorkerReport& worker : workers) {
    present.insert(worker.rank);
    world = std::max({world, worker.world, worker.rank + 1});
  }
  if (number < 0) return present;
  for (const int rank : find_ranks(number, world)) {
    if (present.contains(rank)) members.insert(rank);
  }
  if (!members.empty()) return members;
  for (const WorkerReport& worker : workers) {
    if (is_seen_in(worker, number)) members.insert(worker.rank);
  }
  return members;
}

namespace {

/// Returns what a worker does, in a few words.
using DescribeOccupation = std::function<std::string(const WorkerReport&)>;

/// Ranks that a text lists.
constexpr int kMostAwaited = 8;

const WorkerReport::Operation* oldest_message(const WorkerReport& worker, double least_seconds) {
  const WorkerReport::Operation* oldest = nullptr;
  for (const WorkerReport::Operation& operation : worker.open) {
    if (operation.kind != "message" || operation.seconds < least_seconds) continue;
    if (oldest == nullptr || operation.seconds > oldest->seconds) oldest = &operation;
  }
  return oldest;
}

/// The oldest send() or recv() in which each worker has waited for `least_seconds` or more: one text each, which says
/// what the rank that could end the wait does; for a recv() from any rank, what each rank of its group does.
std::vector<std::string> find_message_waits(const std::vector<WorkerReport>& workers, double least_seconds,
                                            const DescribeOccupation& occupation) {
  std::vector<std::string> texts;
  for (const WorkerReport& worker : workers) {
    const WorkerReport::Operation* message = oldest_message(worker, least_seconds);
    if (message == nullptr) continue;
    std::string text =
        fmt::format("rank {} has waited in '{}' for {:.1f} s", worker.rank, message->name, message->seconds);
    const std::set<int> members =
        message->peer >= 0 ? std::set<int>{message->peer} : members_of_group(message->part, workers);
    int listed = 0;
    for (const WorkerReport& other : workers) {
      if (other.rank == worker.rank || !members.contains(other.rank) || ++listed > kMostAwaited) continue;
      text += fmt::format("; rank {}: {}", other.rank, occupation(other));
    }
    if (listed > kMostAwaited) text += fmt::format("; and {} more ranks", listed - kMostAwaited);
    texts.push_back(std::move(text));
  }
  return texts;
}

std::string age_of(double seconds) {
  return seconds < 60 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

/// " on host 1 (gpu07)"; empty if the job runs on one host.
std::string on_host(const WorkerReport& worker) {
  return worker.node < 0 ? "" : fmt::format(" on {}", name_of_host(worker.node, worker.host));
}

std::string describe_worker_of(const WorkerReport& worker) {
  return fmt::format("rank {} ({}, pid {}{})", worker.rank, worker.name, worker.process, on_host(worker));
}

/// What is known of a worker that does not answer.
std::string describe_silence(const WorkerReport& worker) {
  return worker.trouble.empty() ? "it does not answer"
                                : fmt::format("nothing is known of it: {}", worker.trouble);
}

std::string site_of(const WorkerReport::Call& call) {
  return call.site.empty() ? "" : fmt::format(" at {}", call.site);
}

/// The command that prints what a worker's threads do.
std::string threads_of(const WorkerReport& worker) {
  return fmt::format("its threads{}: gdb -p {} -batch -ex 'thread apply all bt'",
                     worker.node < 0 ? "" : " there", worker.process);
}

/// What a worker itself does, in a few words.
std::string occupation(const WorkerReport& worker) {
  for (const WorkerReport::Call& call : worker.serving) {
    if (call.begun)
      return fmt::format("it has run '{}' for {} for {}", call.name, call.peer, age_of(call.seconds));
  }
  const WorkerReport::Operation* future = nullptr;
  for (auto operation = worker.open.rbegin(); operation != worker.open.rend(); ++operation) {
    if (!is_future_wait(*operation)) {
      return fmt::format("it has been in '{}' for {}", operation->name, age_of(operation->seconds));
    }
    future = &*operation;
  }
  if (!worker.pending.empty()) {
    const WorkerReport::Call& call = worker.pending.front();
    return fmt::format("it has waited for '{}' on {} for {}", call.name, call.peer, age_of(call.seconds));
  }
  if (future != nullptr) return fmt::format("it has waited for a future for {}", age_of(future->seconds));
  return "it is in its own code, outside all calls and operations; " + threads_of(worker);
}

class Suspects {
 public:
  Suspects(const std::vector<WorkerReport>& workers, double least) : workers_(workers), least_(least) {
    for (const WorkerReport& worker : workers) by_name_[worker.name] = &worker;
  }

  std::vector<std::string> find() {
    for (const WorkerReport& worker : workers_) check_stopped(worker);
    find_cycle();
    check_operations();
    check_messages();
    // After a timeout, a worker of a cycle or an operation may have ended because of it.
    for (const WorkerReport& worker : workers_) check_departed(worker);
    check_hosts();
    check_pipelines();
    for (const WorkerReport& worker : workers_) check_backward(worker);
    for (const WorkerReport& worker : workers_) check_sink(worker);
    texts_.insert(texts_.end(), consequences_.begin(), consequences_.end());
    if (texts_.empty()) check_futures();
    return std::move(texts_);
  }

 private:
  void check_stopped(const WorkerReport& worker) {
    const std::string who = describe_worker_of(worker);
    if (worker.process_state == 'T') {
      texts_.push_back(fmt::format("{} is stopped by a signal; to continue it{}: kill -CONT {}", who,
                                   worker.node < 0 ? "" : " there", worker.process));
    } else if (worker.process_state == 't') {
      texts_.push_back(fmt::format("{} is stopped by a debugger", who));
    } else {
      return;
    }
    blamed_.insert(worker.name);
  }

  void check_departed(const WorkerReport& worker) {
    const std::string who = describe_worker_of(worker);
    if (worker.process_state == 'T' || worker.process_state == 't' || !worker.trouble.empty()) return;
    if (worker.process_state == 'Z' || worker.process_state == 'X') {
      texts_.push_back(fmt::format("{} has died", who));
    } else if (!worker.answers) {
      texts_.push_back(
          fmt::format("{} does not answer (process state {}): its processor or disk is overloaded, or "
                      "the process hangs; {}",
                      who, worker.process_state, threads_of(worker)));
    }
    if (!worker.answers) blamed_.insert(worker.name);
  }

  /// Hosts whose launchers did not answer.
  void check_hosts() {
    std::map<int, std::vector<int>> ranks;  // by node
    std::map<int, const WorkerReport*> first;
    for (const WorkerReport& worker : workers_) {
      if (!worker.host_silent) continue;
      ranks[worker.node].push_back(worker.rank);
      first.emplace(worker.node, &worker);
      blamed_.insert(worker.name);
    }
    for (const auto& [node, worker] : first) {
      texts_.push_back(fmt::format("nothing is known of {} with rank{} {}: {}",
                                   name_of_host(node, worker->host), ranks[node].size() == 1 ? "" : "s",
                                   format_ranks(ranks[node]), worker->trouble));
    }
  }

  /// The oldest call from one worker to another that has waited long enough.
  const WorkerReport::Call* edge(const WorkerReport& from, const std::string& to) const {
    const WorkerReport::Call* oldest = nullptr;
    for (const WorkerReport::Call& call : from.pending) {
      if (call.peer == to && call.seconds >= least_ &&
          (oldest == nullptr || call.seconds > oldest->seconds)) {
        oldest = &call;
      }
    }
    return oldest;
  }

  /// Follows pending calls from every worker until one repeats.
  void find_cycle() {
    for (const WorkerReport& start : workers_) {
      std::vector<std::string> path;
      if (follow(start, start.name, path)) {
        std::string text;
        for (std::size_t i = 0; i < path.size(); ++i) {
          const WorkerReport& from = *by_name_.at(path[i]);
          const std::string& to = path[(i + 1) % path.size()];
          const WorkerReport::Call& call = *edge(from, to);
          text += fmt::format("{}rank {} has waited for '{}' on {}{} for {}", i == 0 ? "" : ", ", from.rank,
                              call.name, to, site_of(call), age_of(call.seconds));
          blamed_.insert(path[i]);
        }
        texts_.push_back(
            "calls wait for each other: " + text +
            "; if all handler threads are taken, raise WorkerOptions::max_threads, else one of these "
            "handlers must not wait for the other");
        return;
      }
    }
  }

  bool follow(const WorkerReport& worker, const std::string& goal, std::vector<std::string>& path) const {
    path.push_back(worker.name);
    std::set<std::string> tried;
    for (const WorkerReport::Call& call : worker.pending) {
      if (call.seconds < least_ || !tried.insert(call.peer).second || call.peer == worker.name) continue;
      if (call.peer == goal) return true;
      const auto next = by_name_.find(call.peer);
      if (next == by_name_.end() || std::find(path.begin(), path.end(), call.peer) != path.end()) continue;
      if (follow(*next->second, goal, path)) return true;
    }
    path.pop_back();
    return false;
  }

  /// The operation that a worker waits for in a group, and the workers that do.
  using Position = std::pair<std::uint64_t, std::string>;  ///< number and name
  struct Gathering {
    std::map<Position, std::vector<int>> positions;
    double seconds = 0;
    int group = -1;
  };

  /// Operations in which all ranks of a group take part, and which ranks are in which one.
  void check_operations() {
    std::map<std::pair<std::string, int>, Gathering> gatherings;
    for (const WorkerReport& worker : workers_) {
      std::map<std::pair<std::string, int>, const WorkerReport::Operation*> oldest;
      for (const WorkerReport::Operation& operation : worker.open) {
        if (!is_of_group(worker, operation)) continue;
        // A rank of a group waits in one operation at a time; other waits are distinguished by their names.
        const std::string key = operation.part >= 0 ? operation.kind : operation.name;
        const WorkerReport::Operation*& first = oldest[{key, operation.part}];
        if (first == nullptr || operation.id < first->id) first = &operation;
      }
      for (const auto& [key, operation] : oldest) {
        Gathering& gathering = gatherings[key];
        gathering.positions[{operation->id, operation->name}].push_back(worker.rank);
        gathering.seconds = std::max(gathering.seconds, operation->seconds);
        gathering.group = operation->part;
      }
    }
    for (const auto& [key, gathering] : gatherings) {
      if (gathering.seconds >= least_) check_gathering(gathering);
    }
  }

  void check_gathering(const Gathering& gathering) {
    std::set<int> inside;
    std::string text;
    for (auto at = gathering.positions.rbegin(); at != gathering.positions.rend(); ++at) {
      std::vector<int> ranks = at->second;
      inside.insert(ranks.begin(), ranks.end());
      std::sort(ranks.begin(), ranks.end());
      text += fmt::format("{}rank{} {} {} in '{}' number {}", text.empty() ? "" : "; ",
                          ranks.size() == 1 ? "" : "s", format_ranks(ranks), ranks.size() == 1 ? "is" : "are",
                          at->first.second, at->first.first);
    }
    text += fmt::format(", for {}", age_of(gathering.seconds));
    bool missing = false, explained = true;
    std::set<std::string> blamed;
    const std::set<int> members = members_of_group(gathering.group, workers_);
    for (const WorkerReport& worker : workers_) {
      if (inside.contains(worker.rank) || !members.contains(worker.rank)) continue;
      missing = true;
      blamed.insert(worker.name);
      explained = explained && worker.answers && waits_for_a_call(worker);
      text += fmt::format("; rank {} is not in it: {}{}", worker.rank,
                          worker.answers ? occupation(worker) : describe_silence(worker),
                          last_operation(worker, gathering.group));
    }
    text += judgement_of(gathering, missing);
    // Ranks that only serve wait in a barrier for those that call: what holds up the calls is the cause.
    if (gathering.group < 0 && missing && explained) return consequences_.push_back(std::move(text));
    blamed_.merge(blamed);
    texts_.push_back(std::move(text));
  }

  bool waits_for_a_call(const WorkerReport& worker) const {
    return std::any_of(worker.pending.begin(), worker.pending.end(),
                       [&](const auto& call) { return call.seconds >= least_; });
  }

  static std::string last_operation(const WorkerReport& worker, int group) {
    for (const WorkerReport::Operation& operation : worker.ended) {
      if (operation.part != group || operation.kind != "collective") continue;
      return fmt::format(" (its last one of this group was '{}' number {}, {} ago)", operation.name,
                         operation.id, age_of(operation.seconds));
    }
    return "";
  }

  static std::string judgement_of(const Gathering& gathering, bool missing) {
    const auto& [first, last] =
        std::pair(gathering.positions.begin()->first, gathering.positions.rbegin()->first);
    if (first.first != last.first) {
      return "; the numbers differ: the rank with the smaller one is behind, or it left out an operation";
    }
    if (first.second != last.second) {
      return "; the ranks call different operations: all ranks of a group must call the same ones in the "
             "same order";
    }
    return missing ? "" : "; all ranks are in it: its transfer hangs, or it is long";
  }

  void check_messages() {
    const auto what = [](const WorkerReport& worker) {
      return worker.answers ? occupation(worker) : "it does not answer";
    };
    for (std::string& text : find_message_waits(workers_, least_, what)) texts_.push_back(std::move(text));
  }

  static const WorkerReport::Operation* pipeline_operation(const WorkerReport& worker) {
    const auto last = std::find_if(worker.open.rbegin(), worker.open.rend(),
                                   [](const auto& operation) { return operation.kind == "pipeline"; });
    return last == worker.open.rend() ? nullptr : &*last;
  }

  /// Workers that wait in a pipeline's step: names the ones that run an action, or none of the step.
  void check_pipelines() {
    std::string waits, works;
    for (const WorkerReport& worker : workers_) {
      const WorkerReport::Operation* operation = pipeline_operation(worker);
      const bool is_waiting = operation != nullptr && (operation->name.starts_with("wait for ") ||
                                                       operation->name.starts_with("step of pipeline "));
      if (is_waiting && operation->seconds >= least_) {
        waits += fmt::format("; rank {} is in '{}' of step {} for {}", worker.rank, operation->name,
                             operation->id, age_of(operation->seconds));
      } else if (!is_waiting) {
        works += fmt::format("; rank {}: {}", worker.rank,
                             worker.answers ? occupation(worker) : describe_silence(worker));
      }
    }
    if (waits.empty()) return;
    texts_.push_back("a pipeline is stuck" + (works.empty() ? "; no worker runs an action" : works) + waits);
  }

  /// A backward pass that lasts: names what its workers wait for.
  void check_backward(const WorkerReport& root) {
    const auto open = std::find_if(root.open.begin(), root.open.end(), [&](const auto& operation) {
      return operation.kind == "autograd" && operation.name == "backward" && operation.seconds >= least_;
    });
    if (open == root.open.end()) return;
    std::string text;
    for (const WorkerReport& worker : workers_) {
      for (const WorkerReport::Pass& pass : worker.passes) {
        if (pass.id != open->id) continue;
        if (pass.busy) text += fmt::format("; rank {} computes gradients", worker.rank);
        if (!pass.waits.empty())
          text += fmt::format("; rank {} waits for {}", worker.rank, pass.waits.front());
        if (pass.waits.size() > 1) text += fmt::format(" and {} more", pass.waits.size() - 1);
      }
    }
    if (text.empty()) return;
    texts_.push_back(
        fmt::format("the backward pass of rank {} has lasted {}{}; a FAST pass needs a gradient for every "
                    "tensor that was sent",
                    root.rank, age_of(open->seconds), text));
  }

  /// Waits for futures that nothing explains.
  void check_futures() {
    for (const WorkerReport& worker : workers_) {
      const auto wait = std::ranges::find_if(worker.open, [this](const WorkerReport::Operation& operation) {
        return is_future_wait(operation) && operation.seconds >= least_;
      });
      if (wait == worker.open.end()) continue;
      texts_.push_back(fmt::format(
          "rank {} has waited for a future for {}; no call or operation of the job that waits, too, "
          "explains it: the program sets this future",
          worker.rank, age_of(wait->seconds)));
    }
  }

  /// A worker that others wait for and that waits for none.
  void check_sink(const WorkerReport& worker) {
    if (blamed_.contains(worker.name)) return;
    const WorkerReport* oldest = nullptr;
    for (const WorkerReport& other : workers_) {
      const WorkerReport::Call* call = &other == &worker ? nullptr : edge(other, worker.name);
      if (call != nullptr && (oldest == nullptr || call->seconds > edge(*oldest, worker.name)->seconds))
        oldest = &other;
    }
    if (waits_for_a_call(worker) || oldest == nullptr) return;
    const WorkerReport::Call& call = *edge(*oldest, worker.name);
    // Of several calls of one name, the one that has waited longest has been served longest.
    const WorkerReport::Call* served = nullptr;
    std::size_t queued = 0;
    for (const WorkerReport::Call& one : worker.serving) {
      if (!one.begun) ++queued;
      if (one.peer != oldest->name || one.name != call.name) continue;
      if (served == nullptr || one.begun > served->begun ||
          (one.begun == served->begun && one.seconds > served->seconds))
        served = &one;
    }
    texts_.push_back(fmt::format(
        "rank {} has waited for '{}' on {}{} for {}; {}", oldest->rank, call.name, describe_worker_of(worker),
        site_of(call), age_of(call.seconds),
        served != nullptr ? occupation_in(worker, *served, queued)
                          : "that worker does not serve such a call: the request or the reply is on its way, "
                            "or it was lost"));
  }

  /// What a worker does with a call that it serves.
  static std::string occupation_in(const WorkerReport& worker, const WorkerReport::Call& call,
                                   std::size_t queued) {
    if (!call.begun) {
      return fmt::format("it waits there for a thread or an argument; {}", occupation(worker));
    }
    std::string text =
        fmt::format("it has run '{}' for {} for {}", call.name, call.peer, age_of(call.seconds));
    if (queued > 0) {
      text += fmt::format(
          "; {} more calls wait for a thread or an argument there: if handlers block, raise "
          "WorkerOptions::max_threads",
          queued);
    }
    return text;
  }

  const std::vector<WorkerReport>& workers_;
  const double least_;
  std::map<std::string, const WorkerReport*> by_name_;
  std::set<std::string> blamed_;
  std::vector<std::string> texts_;
  std::vector<std::string> consequences_;  ///< of other causes; said last
};

/// What a worker has open, one line each; equal ones are one line with their number.
class OpenLines {
 public:
  explicit OpenLines(std::string kind) : kind_(std::move(kind)) {}
  void add(double seconds, const std::string& what) {
    const auto same = std::ranges::find(lines_, what, &Line::what);
    if (same == lines_.end()) return lines_.push_back({what, seconds, seconds, 1});
    same->oldest = std::max(same->oldest, seconds);
    same->newest = std::min(same->newest, seconds);
    ++same->count;
  }
  void write(std::size_t most, std::string& text) const {
    for (std::size_t i = 0; i < std::min(lines_.size(), most); ++i) {
      const Line& line = lines_[i];
      text += fmt::format("  {:<10} {:>9}  {}", kind_, age_of(line.oldest), line.what);
      if (line.count > 1)
        text += fmt::format("  ({} times, the newest for {})", line.count, age_of(line.newest));
      text += "\n";
    }
    if (lines_.size() > most) text += fmt::format("  {:<10} {} more\n", kind_, lines_.size() - most);
  }

 private:
  struct Line {
    std::string what;
    double oldest, newest;
    std::size_t count;
  };
  const std::string kind_;
  std::vector<Line> lines_;
};

/// The open operations in their order: those of one kind that follow each other are counted together.
void format_operations(const WorkerReport& worker, std::size_t most, std::string& text) {
  for (auto first = worker.open.begin(); first != worker.open.end();) {
    OpenLines lines(first->kind);
    const auto end =
        std::find_if(first, worker.open.end(), [&](const auto& one) { return one.kind != first->kind; });
    for (auto one = first; one != end; ++one)
      lines.add(one->seconds,
                is_future_wait(*one) ? one->name : fmt::format("{}  number {}", one->name, one->id));
    lines.write(most, text);
    first = end;
  }
}

void format_worker(const WorkerReport& worker, std::string& text) {
  const std::string host = worker.node < 0 ? "" : "  " + name_of_host(worker.node, worker.host);
  if (!worker.trouble.empty()) {
    text += fmt::format("\nrank {}  {}{}\n  {}\n", worker.rank, worker.name, host, worker.trouble);
    return;
  }
  text += fmt::format("\nrank {}  {}  pid {}  state {}{}\n", worker.rank, worker.name, worker.process,
                      worker.process_state, host);
  if (!worker.answers) {
    text += "  no answer\n";
    return;
  }
  constexpr std::size_t kMostCalls = 12, kMostOperations = 40;
  format_operations(worker, kMostOperations, text);
  for (const WorkerReport::Operation& operation : worker.ended) {
    text += fmt::format("  {:<10} {:>9}  {}  number {}\n", "ended", age_of(operation.seconds) + " ago",
                        operation.name, operation.id);
  }
  const auto calls = [&](const char* kind, const char* word, const std::vector<WorkerReport::Call>& list) {
    OpenLines lines(kind);
    for (const WorkerReport::Call& call : list) {
      lines.add(call.seconds, fmt::format("'{}' {} {}{}{}", call.name, word, call.peer, site_of(call),
                                          call.begun ? "" : "  (waits for a thread or an argument)"));
    }
    lines.write(kMostCalls, text);
  };
  calls("call", "to", worker.pending);
  calls("serves", "from", worker.serving);
  if (worker.open.empty() && worker.pending.empty() && worker.serving.empty()) {
    text += "  in its own code, outside all calls and operations; " + threads_of(worker) + "\n";
  }
  for (const WorkerReport::Pass& pass : worker.passes) {
    text += fmt::format("  {:<10} {:>9}  id {:#x}\n", "pass", pass.busy ? "busy" : "waits", pass.id);
    for (std::size_t i = 0; i < std::min(pass.waits.size(), kMostCalls); ++i) {
      text += fmt::format("  {:<10} {:>9}  {}\n", "", "for", pass.waits[i]);
    }
  }
  std::string threads;
  for (const auto& [state, number] : worker.threads) threads += fmt::format(" {} {}", number, state);
  text += fmt::format("  threads   {}\n", threads);
}

}  // namespace

std::vector<std::string> find_suspects(const std::vector<WorkerReport>& workers, double least_seconds) {
  return Suspects(workers, least_seconds).find();
}

std::string format_diagnosis(const std::vector<WorkerReport>& workers) {
  const std::vector<std::string> suspects = find_suspects(workers);
  std::string text;
  if (suspects.empty()) text = "No wait is longer than a second: the job is probably not stuck.\n";
  for (std::size_t i = 0; i < suspects.size(); ++i) text += fmt::format("{}. {}\n", i + 1, suspects[i]);
  for (const WorkerReport& worker : workers) format_worker(worker, text);
  return text;
}

}  // namespace torchspan::launch
