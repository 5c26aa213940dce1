#pragma once
#include <functional>
#include <memory>
#include <string>

#include <torchspan/core/observation.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/trace_format.h"

namespace torchspan {

/// How much of a worker's state is described.
enum class StateDetail {
  kBrief,  ///< operations that have begun and not ended, and calls: takes microseconds
  kFull,   ///< also the last operations of each group that ended, passes, threads, memory and counters
};

/// Writes and serves what the options of one worker ask for, on one thread, which sleeps while there is nothing to
/// do. The destructor completes the files.
class Observation {
 public:
  /// Describes the part of a worker's state that core has no access to, as JSON. Called on the observing thread.
  using DescribeCalls = std::function<std::string(StateDetail)>;

  /// Throws Error{kInvalid} if a file, a folder or the port cannot be used.
  Observation(std::shared_ptr<Runtime> runtime, const ObservationOptions& options,
              const TraceIdentity& identity, DescribeCalls describe_calls = {});
  ~Observation();
  Observation(const Observation&) = delete;

  /// The port that serves metrics; 0: none.
  std::uint16_t metrics_port() const;

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

/// Describes this process as the worker `name`; the clock is read now.
TraceIdentity identify(Executor& executor, const std::string& name, int rank, int world_size);

}  // namespace torchspan
