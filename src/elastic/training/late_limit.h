#pragma once
#include <algorithm>

#include <torchspan/core/time.h>

namespace torchspan::elastic {

/// How long rank 0 waits for the reports of late ranks. A rank that computes or waits for others notices within
/// `step_timeout` that its generation has ended.
constexpr Duration late_limit(Duration step_timeout) {
  constexpr Duration kReportTime = std::chrono::seconds(1);
  return std::min(step_timeout, Duration::max() - kReportTime) + kReportTime;
}

}  // namespace torchspan::elastic
