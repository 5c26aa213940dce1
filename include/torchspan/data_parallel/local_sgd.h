#pragma once
// Data parallelism that averages parameters now and then: local SGD and DiLoCo. Includes no torch/nn.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {

/// Averages gradients over all ranks for the first `start_iteration` reductions, as all_reduce_hook() does, and
/// over the ranks of `near` afterwards; without a `near` group, each rank then keeps its own gradients. The
/// replicas differ from then on: average them with a ModelAverager. Not for steps inside join().
CommHook post_local_sgd_hook(std::int64_t start_iteration);
CommHook post_local_sgd_hook(std::int64_t start_iteration, collective::Group near);

/// A group whose ranks average their parameters after every `period` steps.
struct AveragingLevel {
  collective::Group group;
  std::int64_t period = 1;
};

/// Local SGD: averages the replicas' parameters every few steps instead of their gradients at each step. With
/// several levels, such as {ranks of a host, 2} and {all ranks, 8}, the longest period that is due decides.
/// Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020. Call everything on one thread.
class ModelAverager {
 public:
  /// Collective: throws Error{kInvalid} on all ranks of a level if their parameters, periods or warmups differ, or if they
  /// have different parts of a parameter, or their own ones. Tensors of integers are left alone.
  /// Periods must increase, each a multiple of the previous one. The first `warmup_steps` steps average nothing.
  ModelAverager(std::vector<at::Tensor> parameters, std::vector<AveragingLevel> levels,
                std::int64_t warmup_steps = 0);
  ModelAverager(std::vector<at::Tensor> parameters, collective::Group group, std::int64_t period,
                std::int64_t warmup_steps = 0);

  /// Call after each optimizer step. Returns whether it averaged; if it throws, no parameter has changed.
  bool step();

  std::int64_t steps() const { return steps_; }
  /// Resumes the count of a checkpoint; equal on all ranks.
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  const std::vector<at::Tensor> parameters_;
  const std::vector<AveragingLevel> levels_;
  const std::int64_t warmup_steps_;
  std::int64_t steps_ = 0;
};

struct DiLoCoOptions {
  std::int64_t period = 500;  ///< inner steps between two averages of a parameter
  double outer_lr = 0.7;
  double outer_momentum = 0.9;  ///< of Nesterov's method
  /// Parts of the model, of similar size, that are averaged in turn, evenly spread over a period.
  int fragments = 1;
  std::int64_t delay = 0;  ///< inner steps for which an average may be in flight; less than period
  double keep = 0;         ///< share of the local value that stays when an average arrives, from 0 to 1
};

/// Distributed low-communication training: each rank trains alone with its own optimizer, and the average change of a
/// period is the gradient of an outer Nesterov step. Douillard et al., "DiLoCo", 2023; fragments and delay: "Streaming
/// DiLoCo", 2025. The inner optimizer's state stays local. Call everything on one thread.
class DiLoCo {
 public:
  /// Collective: takes the parameters of the group's rank 0 everywhere. Throws Error{kInvalid} on all ranks if
  /// parameters or options differ, as for ModelAverager. A tensor that is listed twice, as parameters() of a module does for tied
  /// weights, counts once.
  DiLoCo(const std::vector<at::Tensor>& parameters, collective::Group group, DiLoCoOptions options = {});
  DiLoCo(DiLoCo&&) noexcept;
  DiLoCo& operator=(DiLoCo&&) noexcept;
  ~DiLoCo();

  /// Call after each inner optimizer step. Returns whether the parameters have received an outer step.
  bool step();
  /// Waits for averages in flight and applies them. Call it on all ranks after the last step and before a
  /// checkpoint.
  void finish();

  std::int64_t steps() const;
  /// The step, and each parameter's outer value and momentum, equal on all ranks. Call after finish().
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Throws Error{kInvalid} for the state of other parameters.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::data_parallel

namespace torchspan {
using data_parallel::AveragingLevel;
using data_parallel::DiLoCo;
using data_parallel::DiLoCoOptions;
using data_parallel::ModelAverager;
}  // namespace torchspan
