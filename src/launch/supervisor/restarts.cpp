#include "launch/supervisor/restarts.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <optional>

#include <torchspan/core/error.h>

#include "launch/supervisor/endings.h"

namespace torchspan::launch {
namespace {

std::optional<int> read_count(std::string_view text) {
  int number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  if (number < 1 || number > kMostWorkers) return std::nullopt;
  return number;
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
  throw_invalid(fmt::format("{} {}: expected a number of workers from 1 to {}, or a range MIN:MAX of them",
                            option, text, kMostWorkers));
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

}  // namespace torchspan::launch
