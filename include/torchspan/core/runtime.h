#pragma once
#include <string>

#include <torchspan/core/executor.h>
#include <torchspan/core/log.h>
#include <torchspan/core/metrics.h>
#include <torchspan/core/spans.h>

namespace torchspan {

/// What every room needs of its worker: the door to threads and time, the log, the counters and the spans.
/// Owned by the session or by a test, handed down by reference, one per worker.
struct Runtime {
  Runtime(Executor& executor, std::string who, LogLevel level = LogLevel::kWarning)
      : executor(executor), log(std::move(who), level), spans(executor) {}
  Executor& executor;
  Log log;
  Metrics metrics;
  SpanRing spans;
};

}  // namespace torchspan
