#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

/// The factor of the base rate at a step, counted from 0. Any function of the step works.
using LRLambda = std::function<double(std::int64_t step)>;

/// gamma^floor(step / step_size). Like the other schedules here, it throws Error{kInvalid} naming a wrong
/// option when it is converted to an LRLambda.
struct StepLR {
  std::int64_t step_size = 0;  ///< required
  double gamma = 0.1;
  operator LRLambda() const;
};

/// Half a cosine wave from 1 to `eta_min_factor`, then constant (Loshchilov and Hutter, ICLR 2017).
struct CosineAnnealingLR {
  std::int64_t t_max = 0;     ///< steps until the minimum; required
  double eta_min_factor = 0;  ///< minimum, as a factor of the base rate
  operator LRLambda() const;
};

/// Linear warmup from `start_factor` to 1, then another schedule.
struct WarmupLR {
  std::int64_t total_iters = 0;  ///< steps before `then` starts at its step 0; required
  double start_factor = 0;
  LRLambda then = nullptr;  ///< empty: constant 1
  operator LRLambda() const;
};

/// Half a wave from 1 / div_factor up to 1, half a wave down to 1 / (div_factor * final_div_factor), then
/// constant (Smith and Topin, arXiv 1708.07120). The base rate is the maximum.
struct OneCycleLR {
  std::int64_t total_steps = 0;  ///< at least 2; required
  double pct_start = 0.3;        ///< fraction of the steps with a rising rate
  double div_factor = 25;
  double final_div_factor = 1e4;
  operator LRLambda() const;
};

/// Sets each group's rate to its base rate times the schedule's factor, locally or on all owners. The base
/// rate is the group's rate when the scheduler is created. Holds a reference: the optimizer must outlive
/// it.
class LRScheduler {
 public:
  /// Sets the rates of step 0. Throws Error{kInvalid} for an empty schedule.
  LRScheduler(LRTarget& optimizer, const LRLambda& schedule);
  /// One schedule per group.
  LRScheduler(LRTarget& optimizer, std::vector<LRLambda> schedules);

  /// Advances to the next step; call it after each optimizer step.
  void step() { set_steps(steps_ + 1); }
  std::int64_t steps() const { return steps_; }
  /// Jumps to a step, for resuming training.
  void set_steps(std::int64_t steps);

  /// The step and the base rates.
  StateDict state_dict() const;
  /// Restores the step and base rates and sets the rates. Throws Error{kInvalid} if the number of groups
  /// differs.
  void load_state_dict(const StateDict& state);

 private:
  LRTarget& optimizer_;
  std::vector<LRLambda> schedules_;
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

}  // namespace torchspan::optim
