#pragma once
// GradScaler: scaling of losses and gradients for float16. Includes no torch/nn.
#include <concepts>
#include <functional>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< of the scale, after growth_interval steps in a row; > 1
  double backoff_factor = 0.5;  ///< of the scale, after a step with a gradient that is not finite; in (0, 1)
  int growth_interval = 2000;
  bool enabled = true;  ///< false: scales by 1 and skips no step
  /// Ranks whose workers train replicas of one model with a DistributedOptimizer, this one included; all of
  /// them step or skip together. Required as for ClipOptions::replicas.
  std::vector<int> replicas = {};
  /// Combines this rank's finding (true: a gradient is not finite) with those of other ranks, for parameters
  /// that no DistributedDataParallel averages: averaged gradients are equal on all ranks, and so is the
  /// finding. Called once per step of a local optimizer, after its gradients were divided by the scale: if it
  /// throws, compute new gradients and call update(), which keeps the scale.
  std::function<bool(bool)> agree = {};
};

namespace detail {
/// Of an optimizer of LibTorch.
template <class O>
std::vector<at::Tensor> parameters_of(O& optimizer) {
  std::vector<at::Tensor> all;
  for (auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}
}  // namespace detail

/// Loss scaling for mixed-precision training, as torch.amp.GradScaler (Micikevicius et al., Mixed Precision
/// Training, ICLR 2018): multiplies the loss so that small gradients do not underflow in half precision,
/// divides the gradients before the step, and skips steps whose gradients are not finite. Each iteration:
/// scale(loss), backward, step(optimizer) for each optimizer, update(). Not thread-safe.
class GradScaler {
 public:
  /// Throws Error{kInvalid} that names an option out of range.
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss, or another output, multiplied by the scale; float and double keep their dtype, half and
  /// bfloat16 become float.
  at::Tensor scale(const at::Tensor& output) const;

  /// Divides the `.grad` of all parameters, also those that are not finite, by the scale, in place; call it before
  /// clipping. step() calls it otherwise. Waits for devices once, however many there are. Throws Error{kInvalid} if
  /// called twice for one optimizer before update(), also if the first call failed: some gradients may be divided.
  void unscale_(Optimizer& optimizer) { unscale(&optimizer, optimizer.parameters()); }
  template <class O>
  requires requires(O& optimizer) { optimizer.param_groups(); }
  void unscale_(O& optimizer) { unscale(&optimizer, detail::parameters_of(optimizer)); }
  /// The same for a ZeroRedundancyOptimizer, on all ranks.
  template <class O>
  requires requires(O& optimizer, double scale) {
    { optimizer.unscale(scale) } -> std::same_as<bool>;
  }
  void unscale_(O& optimizer) {
    unscale(&optimizer, [&optimizer](double scale) { return optimizer.unscale(scale); });
  }
  /// Divides the gradients that the next step() of `optimizer` with `context` uses; call it before
  /// clip_grad_norm(). Those in the context are unchanged.
  void unscale_(DistributedOptimizer& optimizer, const autograd::ContextView& context);

  /// Steps unless a gradient is not finite; returns whether it stepped. O is a class of torch::optim,
  /// optim::Optimizer or ZeroRedundancyOptimizer. Throws Error{kInvalid} if called twice for one optimizer before
  /// update().
  template <class O>
  bool step(O& optimizer) {
    if (!begin_step(&optimizer)) unscale_(optimizer);
    if (!end_step(&optimizer)) return false;
    optimizer.step();
    return true;
  }
  /// The same for the gradients of a context, over all owners: all of them step, or none.
  bool step(DistributedOptimizer& optimizer, const autograd::ContextView& context);

  /// Ends the iteration: lowers the scale if a step was skipped, raises it after growth_interval steps in a
  /// row without one, and keeps it if unscale_() failed. Throws Error{kInvalid} if no optimizer was unscaled since
  /// the last call.
  void update();
  /// Ends the iteration and sets the scale.
  void update(double new_scale);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }

  /// Scale and number of steps since it changed last ("scale", "growth_tracker").
  StateDict state_dict() const;
  /// Throws Error{kInvalid} for a state with other entries, and then changes nothing.
  void load_state_dict(const StateDict& state);

 private:
  struct Progress {
    bool complete = false;   ///< unscaled without an error
    bool unchanged = false;  ///< unscale_() failed before it changed anything: it may be called again
    bool found_inf = false;
    bool stepped = false;
    std::uint64_t context = 0;  ///< of a DistributedOptimizer's gradients
  };
  void check_first_unscale(const void* optimizer) const;
  void unscale(const void* optimizer, const std::vector<at::Tensor>& parameters);
  /// `divide`: divides the gradients by the scale; returns whether one is not finite.
  void unscale(const void* optimizer, const std::function<bool(double scale)>& divide);
  /// Returns whether the optimizer is unscaled.
  bool begin_step(const void* optimizer, std::uint64_t context = 0) const;
  /// Returns whether to step.
  bool end_step(const void* optimizer);
  void end_iteration(double scale, int tracker);

  const GradScalerOptions options_;
  double scale_;
  int growth_tracker_ = 0;
  std::map<const void*, Progress> iteration_;  ///< optimizers unscaled since the last update()
};

}  // namespace torchspan::optim

namespace torchspan {
using optim::GradScaler;
using optim::GradScalerOptions;
}  // namespace torchspan
