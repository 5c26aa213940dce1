#pragma once
#include <map>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// Formats successive reports of a job as a table: processor, memory, calls per second, the oldest wait.
class TopView {
 public:
  /// `elapsed`: since the last call.
  std::string show(const std::vector<WorkerReport>& workers, Duration elapsed);

 private:
  std::map<int, WorkerReport> previous_;  ///< by rank
};

}  // namespace torchspan::launch
