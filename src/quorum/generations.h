#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>

#include "quorum/api/generation.h"

namespace torchspan::quorum {

/// Rank 0's table of generations: reports in, generations out. Decides the outcome of a step that was
/// interrupted (docs/architecture/survival.md). Without I/O, clock and threads; for one thread at a time.
class Generations {
 public:
  struct Answers {
    std::function<void(int rank, const Generation&)> announce;
    std::function<void(int rank, const Error&)> refuse;
  };
  /// The first generation waits for `ranks`: those of the world, of which an open one may lack some.
  Generations(std::set<int> ranks, Answers answers)
      : answers_(std::move(answers)), expected_(std::move(ranks)) {}

  /// A rank reports, or repeats its report because the answer was lost.
  void report(int rank, const Report& report, TimePoint now);
  /// The process of a rank has ended, or has withdrawn because of `why`. Its rank may report again later, as a rank
  /// without state, also if its process lives: a failed step may have changed half of its state.
  void gone(int rank, const std::string& why, TimePoint now);
  void tick(TimePoint now);
  Deadline next_deadline() const;

  /// Whether a rank waits for the next generation: the others should report after their current step.
  bool is_awaited() const { return !reports_.empty(); }
  /// Whether `rank` should report: a rank waits, or the current generation lacks `rank` or has lost a member.
  bool is_over_for(int rank) const;
  const Generation& current() const { return current_; }

 private:
  bool is_trusted(int rank, const Report& report) const;
  bool is_awaited_without_limit(int rank) const;
  /// What `member` returns, from the rank with the strictest option.
  template <class T>
  T most(T Report::*member, bool largest) const;
  void decide(TimePoint now);
  std::optional<Generation> next() const;
  void announce(Generation generation);
  void refuse_all(const Error& error);
  /// Why the ranks left that `which` accepts.
  std::string recent_ends(const std::function<bool(int rank)>& which) const;

  const Answers answers_;
  Generation current_;
  std::set<int> expected_;           ///< ranks without whose report nothing is decided
  std::map<int, Report> reports_;    ///< of the ranks that wait
  std::map<int, std::string> ends_;  ///< why ranks left, since the current generation began
  Deadline late_at_;                 ///< missing ranks are left out then
  Deadline too_few_at_;              ///< the waiting ranks are refused then
  bool state_lost_ = false;
};

}  // namespace torchspan::quorum
