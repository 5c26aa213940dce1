#pragma once
#include <cstddef>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/passes/parameter_slots.h"

namespace torchspan::data_parallel {

/// Which gradients were undefined before the first pass since the last reduction. If the reduction fails, they become
/// undefined again, so that ranks have the same gradients defined, whichever passes each has run. Thread-safe.
class UndefinedGradients {
 public:
  explicit UndefinedGradients(const ParameterSlots& slots) : slots_(slots) {}

  /// A pass begins that may fill `.grad`.
  void pass_begins(const engine::GradientSink& sink);
  /// The reduction succeeded.
  void forget();
  /// The reduction failed.
  void restore();

 private:
  const ParameterSlots& slots_;
  Mutex mutex_;
  bool noted_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::vector<std::size_t> undefined_ TORCHSPAN_GUARDED_BY(mutex_);  // slots
};

}  // namespace torchspan::data_parallel
