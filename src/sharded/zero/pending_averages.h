#pragma once
#include <cstdint>
#include <memory>

#include <ATen/core/ivalue.h>

#include <torchspan/detail/data_parallel/wrapped_module.h>

#include "sharded/zero/gradient_scatter.h"

namespace torchspan::sharded {

/// Knows whether gradients wait for a step. The ranks of the last reduction agree on it between passes. For the
/// training thread, and for the thread of its backward pass.
class PendingAverages {
 public:
  PendingAverages(std::shared_ptr<data_parallel::WrappedModule> wrapped,
                  std::shared_ptr<GradientScatter> scatter);

  /// Whether exactly one reduction has begun since the last forget(), and has succeeded.
  bool exist() const;
  /// Throws Error{kInvalid} that names the function `call` unless they exist.
  void check(const char* call) const;
  /// Whether a reduction has begun since the last forget(), also if it failed.
  bool any_begun() const { return scatter_->begun() > 0; }
  /// The gradients of past reductions are not used any more.
  void forget();

 private:
  const std::shared_ptr<data_parallel::WrappedModule> wrapped_;
  const std::shared_ptr<GradientScatter> scatter_;
  std::uint64_t forgotten_ = 0;  // reductions that had succeeded at the last forget()
};

}  // namespace torchspan::sharded
