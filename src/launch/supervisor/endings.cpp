#include "launch/supervisor/endings.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <regex>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"

namespace torchspan::launch {

namespace {

Reaction react_to_another(Interruption& interruption, int signal, int preempt_signal) {
  const bool preempts = signal == SIGTERM || signal == preempt_signal;
  if (interruption.signal == 0) {
    interruption.signal = signal;
    interruption.preemption = preempts;
    return preempts ? Reaction::kPreempt : Reaction::kStop;
  }
  if (signal == preempt_signal && signal != SIGTERM) return Reaction::kNone;
  if (!interruption.preemption) return Reaction::kKill;
  if (!preempts) {
    interruption.signal = signal;
    interruption.preemption = false;
    return Reaction::kStop;
  }
  if (interruption.signal == SIGTERM) return Reaction::kKill;
  interruption.signal = SIGTERM;
  return Reaction::kPreempt;
}

}  // namespace

Reaction react(Interruption& interruption, int signal, int preempt_signal, bool reported) {
  const int before = interruption.signal;
  if (signal == before && (reported || std::exchange(interruption.reported, false))) return Reaction::kNone;
  const Reaction reaction = react_to_another(interruption, signal, preempt_signal);
  if (interruption.signal != before) interruption.reported = reported;
  return reaction;
}

namespace {

std::string hint(const Ending& ending) {
  if (ending.signal == SIGKILL && !ending.asked) {
    return " (by a user, or by the system for lack of memory: see 'dmesg')";
  }
  if (ending.signal == SIGABRT) return " (an uncaught exception or a failed check)";
  if (ending.signal == SIGSEGV || ending.signal == SIGBUS) return " (a bad memory access)";
  if (ending.signal == SIGUSR1 || ending.signal == SIGUSR2) {
    return " (the program does not handle it: see torchspan::Preemption)";
  }
  if (ending.code == 127) return " (often: a program or library was not found)";
  return "";
}

std::string name_of(const Ending& ending) {
  return fmt::format("{} (rank {}, pid {})", ending.name, ending.rank, ending.pid);
}

std::string seconds(Duration time) { return fmt::format("{:.1f} s", to_seconds(time)); }

/// Returns "worker0: failed because of it (exited with code 1); worker2, worker3: stopped (was killed by
/// SIGTERM)", by rank. A worker failed because of the first failure if its `endings[i].blames` is that
/// process.
std::string describe_others(const std::vector<Ending>& endings, std::optional<std::size_t> first) {
  std::vector<Ending> others;
  for (std::size_t i = 0; i < endings.size(); ++i) {
    if (i != first && !endings[i].replaced) others.push_back(endings[i]);
  }
  std::sort(others.begin(), others.end(), [](const Ending& a, const Ending& b) { return a.rank < b.rank; });
  std::map<std::string, std::string> names;  // workers by how they ended
  std::vector<std::string> order;
  for (const Ending& ending : others) {
    const bool followed =
        first && ending.failed() && !ending.stopped() && ending.blames == endings[*first].process();
    const std::string outcome = followed ? fmt::format("failed because of it ({})", describe(ending))
                                : ending.asked && ending.failed()
                                    ? fmt::format("stopped ({})", describe(ending))
                                    : describe(ending);
    auto& list = names[outcome];
    if (list.empty()) order.push_back(outcome);
    list += (list.empty() ? "" : ", ") + ending.name;
  }
  std::string text;
  for (const auto& outcome : order)
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", names[outcome], outcome);
  return text;
}

}  // namespace

bool Ending::stopped() const {
  constexpr std::array kOurs = {SIGTERM, SIGINT, SIGHUP, SIGKILL, SIGUSR1, SIGUSR2};
  return asked && std::find(kOurs.begin(), kOurs.end(), signal) != kOurs.end();
}

bool is_crash(int signal) {
  constexpr std::array kCrashes = {SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  return std::find(kCrashes.begin(), kCrashes.end(), signal) != kCrashes.end();
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::string describe(const Ending& ending) {
  if (ending.signal != 0) return fmt::format("was killed by {}{}", signal_name(ending.signal), hint(ending));
  return fmt::format("exited with code {}{}", ending.code, hint(ending));
}

std::string describe_failure(const Ending& ending) {
  return describe(ending) + (ending.failed() ? "" : " without shutdown()");
}

RankProcess blamed_process(const std::vector<std::string>& last_lines) {
  // A worker that "left because" another one died is not the cause; its reason follows and is matched
  // instead.
  const std::regex death(
      R"(\(rank (\d{1,9}), pid (\d{1,9}) on [^)]*\) (died|left without|left because its ))");
  std::smatch match;
  for (const std::string& line : last_lines) {
    if (std::regex_search(line, match, death)) return {std::stoi(match[1]), std::stol(match[2])};
  }
  return {};
}

namespace {

std::optional<std::size_t> first_seen_failure(const std::vector<Ending>& endings) {
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < endings.size(); ++i) {
    const Ending& ending = endings[i];
    if (!ending.failed() || ending.asked || ending.replaced) continue;
    if (!first) {
      first = i;
      if (is_crash(ending.signal)) return first;
    } else if (is_crash(ending.signal) && ending.after - endings[*first].after <= kSettleTime) {
      return i;
    }
  }
  return first;
}

}  // namespace

std::optional<std::size_t> first_failure(const std::vector<Ending>& endings) {
  std::optional<std::size_t> first = first_seen_failure(endings);
  for (std::size_t steps = 0; first && steps < endings.size(); ++steps) {
    const auto blamed = std::find_if(endings.begin(), endings.end(), [&](const Ending& ending) {
      const bool by_itself = ending.asked ? ending.failed() && !ending.stopped() : true;
      const bool survived = ending.replaced && endings[*first].after - ending.after > kCauseTime;
      return by_itself && !survived && ending.process() == endings[*first].blames;
    });
    if (blamed == endings.end()) break;
    first = static_cast<std::size_t>(blamed - endings.begin());
  }
  return first;
}

int failure_code(const std::vector<Ending>& endings) {
  auto first = first_failure(endings);
  if (first && !endings[*first].failed()) first = first_seen_failure(endings);
  if (!first) return 0;
  const Ending& ending = endings[*first];
  return ending.signal != 0 ? 128 + ending.signal : ending.code;
}

namespace {

/// Whether the job was preempted and every worker then exited with 0.
bool ended_cleanly(const std::vector<Ending>& endings, const Interruption& interruption) {
  return interruption.preemption && std::none_of(endings.begin(), endings.end(), [](const Ending& ending) {
           return ending.failed() && !ending.replaced;
         });
}

}  // namespace

int exit_code(const std::vector<Ending>& endings, const Interruption& interruption) {
  if (interruption.signal == 0) return failure_code(endings);
  return ended_cleanly(endings, interruption) ? interruption.clean_code : 128 + interruption.signal;
}

std::string describe_replacements(const std::vector<Ending>& endings) {
  std::map<int, const Ending*> last_failures;  // by rank, like the next
  std::map<int, int> replacements;
  for (const Ending& ending : endings) {
    if (ending.replaced) last_failures[ending.rank] = &ending;
    replacements[ending.rank] = std::max(replacements[ending.rank], ending.incarnation);
  }
  std::string text;
  for (const auto& [rank, last] : last_failures) {
    const int count = replacements[rank];
    const std::string times = count == 0   ? "was not replaced"
                              : count == 1 ? "was replaced once"
                                           : fmt::format("was replaced {} times", count);
    text += fmt::format("  {} (rank {}) {}; last failure: pid {} {}, {} after the start\n", last->name, rank,
                        times, last->pid, describe(*last), seconds(last->after));
  }
  return text;
}

std::string describe_first_failure(const std::vector<Ending>& endings, const FailureDetails& details) {
  const auto first = first_failure(endings);
  if (!first) return "";
  std::string text = fmt::format("  first failure: {} {}, {} after the start\n", name_of(endings[*first]),
                                 describe_failure(endings[*first]), seconds(endings[*first].after));
  if (!details.error.empty()) text += fmt::format("  its error: {}\n", details.error);
  if (details.last_lines.empty()) return text + "  it wrote nothing to its standard error\n";
  std::string lines;
  for (const auto& line : details.last_lines) {
    const bool repeats = !details.error.empty() && line.find(details.error) != std::string::npos;
    if (!repeats) lines += "    " + line + "\n";
  }
  return lines.empty() ? text : text + "  its last lines:\n" + lines;
}

std::string summarize(const std::vector<Ending>& endings, const FailureDetails& details,
                      const Interruption& interruption) {
  const auto first = first_failure(endings);
  const int code = exit_code(endings, interruption);
  std::string text;
  if (ended_cleanly(endings, interruption)) {
    return fmt::format(
        "torchspan: the job was preempted by {}, and all workers ended with code 0\n"
        "  exit code: {}\n",
        signal_name(interruption.signal), code);
  }
  if (interruption.signal != 0) {
    text =
        fmt::format("torchspan: the job was {} by {}\n",
                    interruption.preemption ? "preempted" : "interrupted", signal_name(interruption.signal));
  } else if (!first) {
    return "";
  } else {
    text = "torchspan: the job failed\n";
  }
  text += describe_first_failure(endings, details);
  if (const std::string others = describe_others(endings, first); !others.empty()) {
    text += fmt::format("  {}: {}\n", first ? "the others" : "the workers", others);
  }
  return text + fmt::format("  exit code: {}\n", code);
}

namespace {

std::optional<int> read_count(std::string_view text) {
  const auto number = parse_number<int>(text);
  return number && *number >= 1 && *number <= kMostWorkers ? number : std::nullopt;
}

/// Codes with which shells and exec report that a program cannot be run.
bool is_unusable(const AttemptResult& attempt) {
  return attempt.signal == 0 && (attempt.code == 126 || attempt.code == 127);
}

std::string outcome(const AttemptResult& attempt) {
  return attempt.signal != 0 ? signal_name(attempt.signal) : fmt::format("exit code {}", attempt.code);
}

/// How many of the last attempts had the same number of workers and failed at once in the same way.
int repeated_at_once(const std::vector<AttemptResult>& attempts) {
  const AttemptResult& last = attempts.back();
  int count = 0;
  for (auto it = attempts.rbegin(); it != attempts.rend(); ++it, ++count) {
    const bool same = it->workers == last.workers && it->code == last.code && it->signal == last.signal;
    if (!same || it->ran >= kAtOnce) break;
  }
  return count;
}

int restarts_used(const std::vector<AttemptResult>& attempts) {
  int used = 0;
  for (std::size_t i = 1; i < attempts.size(); ++i) used += attempts[i].workers >= attempts[i - 1].workers;
  return used;
}

/// `backoff`, doubled for each failure before the last one, back to the last attempt that ran long.
Duration delay_after(const RestartPolicy& policy, const std::vector<AttemptResult>& attempts) {
  Duration delay = std::min(policy.backoff, policy.longest_backoff);
  for (std::size_t i = attempts.size() - 1; i > 0 && attempts[i].ran < policy.healthy_after; --i) {
    if (delay >= policy.longest_backoff / 2) return policy.longest_backoff;
    delay *= 2;
  }
  return delay;
}

/// Returns the reason to end or to shrink instead of a restart with the same number of workers; nullopt to
/// restart.
std::optional<std::string> reason_against_restart(const RestartPolicy& policy,
                                                  const std::vector<AttemptResult>& attempts) {
  const int repeated = repeated_at_once(attempts);
  if (policy.give_up_after > 0 && repeated >= policy.give_up_after && policy.most > 0) {
    return fmt::format(
        "the last {} attempts failed within {:.0f} s of their start with {} (--give-up-after {})", repeated,
        to_seconds(kAtOnce), outcome(attempts.back()), policy.give_up_after);
  }
  if (restarts_used(attempts) < policy.most) return std::nullopt;
  return policy.most == 0 ? "" : fmt::format("no restart is left (--max-restarts {})", policy.most);
}

}  // namespace

WorkerRange parse_workers(std::string_view text, std::string_view option) {
  const auto colon = text.find(':');
  const auto least = read_count(text.substr(0, colon));
  const auto most = colon == std::string_view::npos ? least : read_count(text.substr(colon + 1));
  if (least && most && *least <= *most) return {*least, *most};
  throw_invalid("{} {}: expected a number of workers from 1 to {}, or a range MIN:MAX of them", option, text,
                kMostWorkers);
}

NextAttempt next_attempt(const RestartPolicy& policy, WorkerRange range,
                         const std::vector<AttemptResult>& attempts) {
  const AttemptResult& last = attempts.back();
  if (is_unusable(last)) {
    const bool restarting = policy.most > 0 || range.least < range.most;
    return {0, Duration(0),
            restarting
                ? fmt::format("exit code {} means that a program cannot be run, so it is not started again",
                              last.code)
                : ""};
  }
  const Duration delay = delay_after(policy, attempts);
  if (last.started < last.workers && last.started >= range.least) {
    return {last.started, delay,
            fmt::format("only {} of {} workers could be started", last.started, last.workers)};
  }
  auto reason = reason_against_restart(policy, attempts);
  if (!reason && last.workers < range.most && last.ran >= policy.healthy_after) {
    return {range.most, delay, fmt::format("the last attempt ran for {:.0f} s", to_seconds(last.ran))};
  }
  if (!reason) return {last.workers, delay, ""};
  if (last.workers > range.least) return {last.workers - 1, delay, *reason};
  if (range.least < range.most) {
    *reason += fmt::format("{}fewer than {} workers are not allowed (MIN of -n)",
                           reason->empty() ? "" : ", and ", range.least);
  }
  return {0, Duration(0), *reason};
}

namespace {

AttemptResult process_result(const Ending& ending) {
  return {.workers = 1, .started = 1, .ran = ending.ran, .code = ending.code, .signal = ending.signal};
}

/// The rule of restarts, for the processes of one rank: only their number is limited elsewhere.
NextAttempt next_process(RestartPolicy policy, const std::vector<AttemptResult>& failures) {
  policy.most = static_cast<int>(failures.size());
  return next_attempt(policy, {1, 1}, failures);
}

}  // namespace

std::optional<std::string> Replacements::reason_against(const Ending& failed) const {
  if (failed.rank == 0) {
    return fmt::format("{} is rank 0, which serves the store of the job and cannot be replaced", failed.name);
  }
  const auto before = failures_.find(failed.rank);
  std::vector<AttemptResult> failures;
  if (before != failures_.end()) failures = before->second;
  failures.push_back(process_result(failed));
  const NextAttempt next = next_process(policy_, failures);
  if (next.workers == 0) return fmt::format("{}: {}", failed.name, next.reason);
  return std::nullopt;
}

std::optional<std::string> Replacements::plan(const std::vector<Ending>& failed, TimePoint now) {
  if (policy_.most_replacements == 0 || stopped_) return "";
  for (const Ending& ending : failed) {
    if (auto reason = reason_against(ending)) return reason;
  }
  if (used_ + static_cast<int>(failed.size()) > policy_.most_replacements) {
    return fmt::format("no replacement is left (--max-replacements {})", policy_.most_replacements);
  }
  for (const Ending& ending : failed) {
    auto& failures = failures_[ending.rank];
    failures.push_back(process_result(ending));
    waiting_[ending.rank] = now + next_process(policy_, failures).delay;
    ++used_;
  }
  return std::nullopt;
}

std::vector<int> Replacements::take_due(TimePoint now) {
  std::vector<int> due;
  for (const auto& [rank, start] : waiting_) {
    if (Deadline(start).passed(now)) due.push_back(rank);
  }
  for (const int rank : due) waiting_.erase(rank);
  return due;
}

std::vector<int> Replacements::stop() {
  std::vector<int> ranks;
  for (const auto& [rank, start] : waiting_) ranks.push_back(rank);
  waiting_.clear();
  stopped_ = true;
  return ranks;
}

Deadline Replacements::next() const {
  Deadline next = Deadline::never();
  for (const auto& [rank, start] : waiting_) next = earlier(next, Deadline(start));
  return next;
}

int Replacements::incarnation(int rank) const {
  const auto found = failures_.find(rank);
  return found == failures_.end() ? 0 : static_cast<int>(found->second.size());
}

}  // namespace torchspan::launch
