#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/buckets/buckets.h"
#include "data_parallel/passes/parameter_slots.h"
#include "data_parallel/rounds/status_exchange.h"

namespace torchspan::data_parallel {

/// Gives gradients that are views of buckets memory that no reduction writes to: copies, or zeros.
void move_out_of_buckets(const ParameterSlots& slots, const Buckets& buckets, engine::GradientSink& sink,
                         bool keep_values);

/// Copies gradients of one round between the pass's sink and the buckets. `in_place`: gradients are views of
/// buckets, except those that another reducer reads too. Different threads may put different slots.
class GradientTransfer {
 public:
  GradientTransfer(const ParameterSlots& slots, std::shared_ptr<Buckets> buckets, bool in_place);
  GradientTransfer(const GradientTransfer&) = delete;
  GradientTransfer& operator=(const GradientTransfer&) = delete;

  struct PutOptions {
    double factor = 1;
    bool shared = false;  ///< another reducer reads the gradient
  };
  /// Puts factor · gradient, or zeros for an undefined gradient, into the slot's part of its bucket. On devices, gradients
  /// are delayed until complete(), which copies them together. Throws Error{kInvalid} that names the parameter if the
  /// gradient does not fit.
  void put(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient,
           const PutOptions& options);
  /// Copies what put() delayed of a bucket, on the streams on which it was put.
  void complete(engine::GradientSink& sink, std::size_t bucket);
  /// Remembers the gradient of a slot that this pass did not use. It is restored if no rank used it.
  void keep(std::size_t slot, const at::Tensor& gradient);
  /// Gives gradients memory outside the buckets, with zeros.
  void leave_buckets(engine::GradientSink& sink) const;
  /// Writes the averages to the sink, except for parameters that no rank used.
  void write_back(engine::GradientSink& sink, const StatusExchange& status) const;
  /// Moves gradients that are views of the buckets into `rebuilt`.
  void move_to(Buckets& rebuilt, engine::GradientSink& sink) const;

 private:
  /// Gradients of one bucket that were put on one stream.
  struct Delayed {
    c10::Stream stream;
    double factor;
    std::vector<std::size_t> slots;
    std::vector<at::Tensor> gradients;
  };
  /// Leaves a gradient to complete(). Returns false if it must be put at once.
  bool delay(std::size_t slot, const at::Tensor& gradient, const PutOptions& options);
  struct Copies {
    std::vector<at::Tensor> to, from;
  };
  /// Writes an average to the sink, or adds the copy that does.
  void write_slot(engine::GradientSink& sink, std::size_t slot, Copies& copies) const;
  /// Whether the slot's gradient is a view of its bucket.
  bool is_view(std::size_t slot) const { return in_place_ && shared_[slot] == 0; }

  const ParameterSlots& slots_;
  const std::shared_ptr<Buckets> buckets_;
  const bool in_place_;
  std::vector<std::uint8_t> shared_;  // by slot
  mutable Mutex mutex_;
  std::vector<std::pair<std::size_t, at::Tensor>> kept_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::vector<Delayed>> delayed_ TORCHSPAN_GUARDED_BY(mutex_);  // by bucket
};

}  // namespace torchspan::data_parallel
