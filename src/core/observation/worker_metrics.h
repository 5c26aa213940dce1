#pragma once
#include <map>
#include <string>
#include <vector>

#include <torchspan/detail/core/runtime.h>

#include "core/api/trace_format.h"
#include "core/observation/prometheus.h"

namespace torchspan {

/// The metrics of one worker. For one thread at a time.
class WorkerMetrics {
 public:
  WorkerMetrics(Runtime& runtime, const TraceIdentity& identity) : runtime_(runtime), identity_(identity) {}

  /// Takes in what was recorded since the last call.
  void collect();
  /// Returns the metrics in Prometheus' text format.
  std::string text();

 private:
  Runtime& runtime_;
  const TraceIdentity identity_;
  SpanRecorder::Cursor spans_;
  std::vector<std::string> names_;
  CallHistograms calls_;
  std::uint64_t next_scalar_ = 0;
  std::uint64_t lost_scalars_ = 0;
  std::map<std::string, double> scalars_;  ///< last value, by tag
};

}  // namespace torchspan
