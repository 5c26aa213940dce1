#pragma once
#include <torchspan/core/time.h>

#include "core/api/saturated_time.h"

namespace torchspan::elastic {

/// How long rank 0 waits for the reports of late ranks. A rank that computes or waits for others notices within
/// `step_timeout` that its generation has ended.
constexpr Duration late_limit(Duration step_timeout) {
  constexpr Duration kReportTime = std::chrono::seconds(1);
  return saturated_sum(step_timeout, kReportTime);
}

}  // namespace torchspan::elastic
