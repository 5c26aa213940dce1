#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

/// The factor of the base rate at a step, counted from 0. Any function of the step is one.
using LRLambda = std::function<double(std::int64_t step)>;

/// gamma^(step / step_size), the quotient rounded down. Like the other schedules here, throws Error{kInvalid}
/// naming a wrong option when it becomes an LRLambda.
struct StepLR {
  std::int64_t step_size = 0;  ///< required
  double gamma = 0.1;
  operator LRLambda() const;
};

/// Half a cosine wave from 1 to `eta_min_factor` (Loshchilov and Hutter, ICLR 2017).
struct CosineAnnealingLR {
  std::int64_t t_max = 0;     ///< steps until the minimum, which then stays; required
  double eta_min_factor = 0;  ///< the minimum, as a factor of the base rate
  operator LRLambda() const;
};

/// A straight line from `start_factor` to 1, then another schedule.
struct WarmupLR {
  std::int64_t total_iters = 0;  ///< steps until `then` begins at its own step 0; required
  double start_factor = 0;
  LRLambda then = nullptr;  ///< 1 forever if empty
  operator LRLambda() const;
};

/// Half a wave up from 1 / div_factor to 1, then half a wave down to 1 / (div_factor * final_div_factor),
/// which then stays (Smith and Topin, arXiv 1708.07120). The base rate is the maximum.
struct OneCycleLR {
  std::int64_t total_steps = 0;  ///< at least 2; required
  double pct_start = 0.3;        ///< share of the steps in which the rate rises
  double div_factor = 25;
  double final_div_factor = 1e4;
  operator LRLambda() const;
};

/// Sets the rates of an optimizer's groups, here or on all owners: each group's base rate, which it has when
/// the driver is made, times the schedule's factor. Refers to the optimizer, which must outlive it.
class LRScheduler {
 public:
  /// Sets the rates of step 0. Throws Error{kInvalid} for an empty schedule.
  LRScheduler(LRTarget& optimizer, const LRLambda& schedule);
  /// One schedule for each group.
  LRScheduler(LRTarget& optimizer, std::vector<LRLambda> schedules);

  /// Goes on to the next step; call it after each step of the optimizer.
  void step() { set_steps(steps_ + 1); }
  std::int64_t steps() const { return steps_; }
  /// Goes to a step, as when training resumes.
  void set_steps(std::int64_t steps);

  /// The step and the base rates.
  StateDict state_dict() const;
  /// Sets the rates that belong to the state. Throws Error{kInvalid} when it is of another number of groups.
  void load_state_dict(const StateDict& state);

 private:
  LRTarget& optimizer_;
  std::vector<LRLambda> schedules_;
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

}  // namespace torchspan::optim
