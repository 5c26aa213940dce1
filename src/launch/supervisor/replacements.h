#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/supervisor/endings.h"
#include "launch/supervisor/restarts.h"

namespace torchspan::launch {

/// Decides which failed workers of an attempt start again while the others go on, and when. Pure: no clock.
/// The first process of a rank is its incarnation 0; each replacement is the next one.
class Replacements {
 public:
  /// `used`: replacements of earlier attempts, which count toward policy.most_replacements.
  Replacements(const RestartPolicy& policy, int used) : policy_(policy), used_(used) {}

  /// Plans a replacement for each of `failed`, or for none of them. Returns why there is none; an empty text if
  /// replacements are off, or after `stop()`. Rank 0 serves the store, so it cannot be replaced.
  std::optional<std::string> plan(const std::vector<Ending>& failed, TimePoint now);
  /// Returns the ranks whose time has come, once each.
  std::vector<int> take_due(TimePoint now);
  /// Forgets the planned replacements and plans no more. Returns the ranks that were waiting.
  std::vector<int> stop();

  bool waiting() const { return !waiting_.empty(); }
  Deadline next() const;
  /// When the planned replacement of a rank starts. Requires that there is one.
  TimePoint start_of(int rank) const { return waiting_.at(rank); }
  /// How many processes of the rank were replaced or are to be replaced.
  int incarnation(int rank) const;
  /// In this attempt and earlier ones.
  int used() const { return used_; }

 private:
  std::optional<std::string> reason_against(const Ending& failed) const;

  const RestartPolicy policy_;
  int used_;
  bool stopped_ = false;
  std::map<int, std::vector<AttemptResult>> failures_;  ///< of replaced processes, by rank
  std::map<int, TimePoint> waiting_;                    ///< by rank: when the replacement starts
};

}  // namespace torchspan::launch
