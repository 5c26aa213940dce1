#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <torchspan/optim/optimizer.h>

namespace torchspan::optim {

/// By what the base rate is multiplied at each step, counted from 0. Any function of the step is one.
using Schedule = std::function<double(std::int64_t step)>;

struct StepDecay {
  std::int64_t every = 0;  ///< steps between two changes; must be given
  double factor = 0.1;     ///< of each change
};
/// factor^(step / every), the quotient rounded down.
Schedule step_decay(StepDecay options);

struct Cosine {
  std::int64_t steps = 0;  ///< until the least factor, which then stays; must be given
  double least = 0;
};
/// Half a cosine wave from 1 to `least` (Loshchilov and Hutter, ICLR 2017).
Schedule cosine(Cosine options);

struct WarmUp {
  std::int64_t steps = 0;   ///< until `then` begins at its own step 0; must be given
  double from = 0;          ///< the first factor
  Schedule then = nullptr;  ///< 1 for ever, if empty
};
/// A straight line from `from` to 1, then another schedule.
Schedule warm_up(WarmUp options);

struct OneCycle {
  std::int64_t steps = 0;       ///< of the whole cycle, at least 2; must be given
  double rising = 0.3;          ///< share of the steps in which the rate rises
  double first = 1.0 / 25;      ///< the first factor
  double last = 1.0 / 250'000;  ///< the last one, which then stays
};
/// Half a wave up from `first` to 1, then half a wave down to `last` (Smith and Topin, arXiv 1708.07120). The
/// base rate is the highest.
Schedule one_cycle(OneCycle options);

/// Sets the rates of an optimizer's groups, here or on all owners: each group's base rate, which it has when
/// the driver is made, times the schedule's factor. Refers to the optimizer, which must outlive it.
class LrSchedule {
 public:
  /// Sets the rates of step 0. Throws Error{kInvalid} for an empty schedule.
  LrSchedule(RateHolder& optimizer, const Schedule& schedule);
  /// One schedule for each group.
  LrSchedule(RateHolder& optimizer, std::vector<Schedule> schedules);

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
  RateHolder& optimizer_;
  std::vector<Schedule> schedules_;
  std::vector<double> base_;
  std::int64_t steps_ = 0;
};

}  // namespace torchspan::optim
