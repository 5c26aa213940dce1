#include "launch/supervisor/replacements.h"

#include <fmt/format.h>

namespace torchspan::launch {
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
