#pragma once
#include <cstdint>
#include <vector>

#include "autograd/contexts/context_state.h"

namespace torchspan::autograd {

/// Destination of one pass's gradients: offers them to the takers of the context, or stores them there.
class ContextSink final : public engine::GradientSink {
 public:
  ContextSink(ContextState& context, std::uint64_t pass) : GradientSink(pass), context_(context) {}
  at::Tensor gradient(const at::Tensor& parameter) const override {
    return context_.gradients().gradient(parameter);
  }
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override;
  void replace(const at::Tensor& parameter, at::Tensor gradient) override;
  /// Completes, never with an error, when the takers have processed the gradients that they took.
  Future<void> takers_done() const;

 private:
  ContextState& context_;
  mutable Mutex mutex_;
  std::vector<Future<void>> taken_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
