#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// What one rank does at a moment.
struct Activity {
  enum class Kind { kComputing, kWaiting, kStopped, kSilent };
  int rank = 0;
  Kind kind = Kind::kComputing;
  std::string text = {};            ///< "waits for rank 1 in 'all_reduce' number 17, 0.3 s"
  std::vector<int> waits_for = {};  ///< ranks
};

/// Returns what every worker does, in the order of `workers`. Pure.
std::vector<Activity> find_activities(const std::vector<WorkerReport>& workers);

/// Finds the ranks that others often wait for, from activities that were sampled at regular times: the shares are
/// averages over about the last 15 samples.
class WaitShares {
 public:
  void add(const std::vector<Activity>& activities);
  /// The share of the time, 0 to 1, in which others wait for `rank`, if it is a straggler: others wait for it in at
  /// least 30 % of the time, and twice as often as it waits itself.
  std::optional<double> straggler_share(int rank) const;

 private:
  struct Shares {
    double awaited = 0;
    double waiting = 0;
  };
  std::map<int, Shares> shares_;  ///< by rank
  int samples_ = 0;
};

}  // namespace torchspan::launch
