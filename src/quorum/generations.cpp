#include "quorum/generations.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/api/saturated_time.h"
#include "quorum/api/generation.h"

namespace torchspan::quorum {

void Participant::commit() {
  ++committed_;
  prepared_ = false;
}

Report Participant::report() const {
  return {
      .generation = generation_, .committed = committed_, .holds_state = holds_state_, .prepared = prepared_};
}

Participant::Adoption Participant::adopt(const Generation& generation, int rank) {
  const bool holds = std::binary_search(generation.holders.begin(), generation.holders.end(), rank);
  const bool apply = holds && prepared_ && generation.step == committed_ + 1;
  generation_ = generation.number;
  prepared_ = false;
  if (apply) {
    ++committed_;
    return Adoption::kApply;
  }
  if (holds && generation.step == committed_) return Adoption::kDiscard;
  committed_ = generation.step;
  holds_state_ = false;
  return Adoption::kCopy;
}

/// Only a member of the current generation knows the outcome of its steps; all others copy.
bool Generations::is_trusted(int rank, const Report& report) const {
  return report.holds_state && expected_.contains(rank);
}

/// Rank 0 has the state with which training begins. It lives, since this table is in its memory.
bool Generations::is_awaited_without_limit(int rank) const { return rank == 0 && current_.number == 0; }

bool Generations::is_over_for(int rank) const {
  if (is_awaited()) return true;
  return current_.number > 0 && (!expected_.contains(rank) || expected_.size() < current_.ranks.size());
}

void Generations::report(int rank, const Report& report, TimePoint now) {
  if (current_.number > 0 && expected_.contains(rank) && report.generation < current_.number) {
    answers_.announce(rank, current_);  // it did not get the answer
    return;
  }
  if (current_.complete && report.target <= current_.step && !expected_.contains(rank)) {
    answers_.announce(rank, current_);  // it comes too late
    return;
  }
  reports_[rank] = report;
  if (expected_.contains(rank)) late_at_ = earlier(late_at_, deadline_after(now, report.late_limit));
  decide(now);
}

void Generations::gone(int rank, const std::string& why, TimePoint now) {
  reports_.erase(rank);
  if (expected_.erase(rank) > 0) ends_[rank] = why;
  // The limit is that of the members that wait.
  const auto waits = [&](int member) { return reports_.contains(member); };
  if (std::none_of(expected_.begin(), expected_.end(), waits)) late_at_ = Deadline::never();
  decide(now);
}

void Generations::tick(TimePoint now) {
  if (late_at_.passed(now)) {
    for (auto rank = expected_.begin(); rank != expected_.end();) {
      if (reports_.contains(*rank) || is_awaited_without_limit(*rank)) {
        ++rank;
        continue;
      }
      ends_[*rank] = "it did not report in time";
      rank = expected_.erase(rank);
    }
    late_at_ = Deadline::never();
    decide(now);
  }
  if (!too_few_at_.passed(now)) return;
  const int wanted = most(&Report::min_ranks, /*largest=*/true);
  refuse_all(
      Error(ErrorKind::kTimedOut,
            fmt::format("only {} rank{} can train, and min_ranks is {}: {}; restart the missing ranks sooner "
                        "(torchspan run --max-replacements), raise too_few_limit, or lower min_ranks",
                        reports_.size(), reports_.size() == 1 ? "" : "s", wanted,
                        recent_ends([this](int rank) { return !reports_.contains(rank); }))));
}

Deadline Generations::next_deadline() const { return earlier(late_at_, too_few_at_); }

template <class T>
T Generations::most(T Report::*member, bool largest) const {
  T best = reports_.begin()->second.*member;
  for (const auto& [rank, report] : reports_)
    best = largest ? std::max(best, report.*member) : std::min(best, report.*member);
  return best;
}

void Generations::decide(TimePoint now) {
  const bool all =
      std::all_of(expected_.begin(), expected_.end(), [&](int rank) { return reports_.contains(rank); });
  if (reports_.empty() || !all) {
    too_few_at_ = Deadline::never();
    return;
  }
  late_at_ = Deadline::never();
  // Those that may still come have no state.
  const bool lost = current_.number > 0 && std::ranges::none_of(expected_, [&](int rank) {
                      return reports_.contains(rank) && is_trusted(rank, reports_.at(rank));
                    });
  if (!lost && static_cast<int>(reports_.size()) < most(&Report::min_ranks, /*largest=*/true)) {
    if (too_few_at_.is_never())
      too_few_at_ = deadline_after(now, most(&Report::too_few_limit, /*largest=*/false));
    return;
  }
  too_few_at_ = Deadline::never();
  if (auto generation = next()) return announce(*std::move(generation));
  state_lost_ = true;
  refuse_all(
      Error(ErrorKind::kDisconnected, fmt::format("all ranks that held the state of step {} or a later one "
                                                  "have left training ({}): restart the job from "
                                                  "its last checkpoint",
                                                  current_.step, recent_ends([](int) { return true; }))));
}

/// The next generation of the ranks that wait; nullopt if none of them has the state.
std::optional<Generation> Generations::next() const {
  Generation generation;
  generation.number = current_.number + 1;
  generation.target = most(&Report::target, /*largest=*/true);
  std::map<int, Report> trusted;
  for (const auto& [rank, report] : reports_) {
    generation.ranks.push_back(rank);
    if (is_trusted(rank, report)) trusted.emplace(rank, report);
  }
  // Before the first generation every rank has a state of its own: that of the first rank counts.
  if (current_.number == 0 && !trusted.empty()) trusted.erase(std::next(trusted.begin()), trusted.end());
  if (trusted.empty() || state_lost_) return std::nullopt;
  for (const auto& [rank, report] : trusted) generation.step = std::max(generation.step, report.committed);
  // A rank that is gone may have committed the step that all others are prepared for.
  const bool all_prepared = std::all_of(trusted.begin(), trusted.end(), [&](const auto& one) {
    return one.second.prepared && one.second.committed == generation.step;
  });
  if (all_prepared) ++generation.step;
  for (const auto& [rank, report] : trusted) {
    const bool applies = report.prepared && report.committed + 1 == generation.step;
    if (report.committed == generation.step || applies) generation.holders.push_back(rank);
  }
  generation.complete = generation.holders == generation.ranks && generation.step >= generation.target;
  return generation;
}

void Generations::announce(Generation generation) {
  current_ = std::move(generation);
  expected_ = {current_.ranks.begin(), current_.ranks.end()};
  reports_.clear();
  ends_.clear();
  const Generation decided = current_;
  for (const int rank : decided.ranks) answers_.announce(rank, decided);
}

void Generations::refuse_all(const Error& error) {
  late_at_ = too_few_at_ = Deadline::never();
  for (const auto& [rank, report] : std::exchange(reports_, {})) answers_.refuse(rank, error);
}

std::string Generations::recent_ends(const std::function<bool(int rank)>& which) const {
  std::vector<std::string> texts;
  for (const auto& [rank, why] : ends_) {
    if (which(rank)) texts.push_back(fmt::format("rank {}: {}", rank, why));
  }
  return texts.empty() ? "no rank ended" : fmt::format("{}", fmt::join(texts, "; "));
}

}  // namespace torchspan::quorum
