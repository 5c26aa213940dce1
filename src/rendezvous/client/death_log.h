#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/executor.h>

#include "rendezvous/first_death.h"

namespace torchspan::rendezvous {

/// Logs the deaths of other workers. All workers log them, and many workers end because another one did. Therefore deaths
/// that follow a warning within some seconds are logged at level info, after one warning that says so. Not thread-safe.
class DeathLog {
 public:
  DeathLog(Log& log, Executor& executor) : log_(log), executor_(executor) {}

  /// Logs deaths of one cause: `messages` name the workers, and `how` completes "7 more workers".
  void write(const std::vector<std::string>& messages, const std::string& how);
  FirstDeath& first() { return first_; }

 private:
  Log& log_;
  Executor& executor_;
  FirstDeath first_;
  std::optional<TimePoint> warned_;  ///< when deaths were last logged as warnings
  bool says_more_ = false;           ///< that more workers died since
};

}  // namespace torchspan::rendezvous
