#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>

#include <torchspan/collective.h>
#include <torchspan/detail/data_parallel/wrapped_module.h>

#include "sharded/parts.h"
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

/// What ranks do in join() between a reduction and the step. If ranks without batches took part in the reduction, the
/// others announce each call of the optimizer to them in one small all-reduce, and all ranks carry it out together.
/// For the training thread.
class JoinProtocol {
 public:
  enum class Verb : std::uint8_t { kStep = 1, kClip = 2, kClear = 3 };

  /// What a rank without batches does with the others.
  struct Shadow {
    std::function<void()> step;
    std::function<void(const ClipTerms&)> clip;
  };

  JoinProtocol(collective::Group group, std::shared_ptr<data_parallel::WrappedModule> wrapped,
               std::shared_ptr<const PendingAverages> pending);

  /// Whether ranks without batches wait for step() or zero_grad().
  bool is_followed() const;
  /// Tells ranks without batches what follows, if they took part in the last reduction. Throws Error{kInvalid} on all
  /// ranks that have batches, and changes nothing, if these announce different verbs.
  void announce(Verb verb, double max_norm = 0, double norm_type = 0) const;
  /// On a rank without batches, after a reduction: returns when the others have stepped or cleared their gradients.
  /// A step that fails on all ranks before it changes anything is not the last call.
  void follow(const Shadow& shadow) const;
  /// Throws Error{kInvalid} instead of beginning a forward or a reduction that ranks without batches do not expect.
  void check_round() const;
  /// The loop of this rank ended with an exception: ranks that wait for its next call fail.
  void give_up(const std::string& reason) const;

 private:
  const collective::Group group_;
  const std::shared_ptr<data_parallel::WrappedModule> wrapped_;
  const std::shared_ptr<const PendingAverages> pending_;
};

}  // namespace torchspan::sharded
