#include "sharded/units/gradient_stream.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "sharded/units/gradient_shards.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {

GradientStream::GradientStream(Unit& unit, bool alone) : unit_(unit), alone_(alone) {
  for (const Unit::Part& part : unit.parts()) {
    if (!part.gradients) continue;
    const FlatLayout& layout = part.parameters->layout();
    const std::size_t first = places_.size();
    places_.resize(first + part.parameters->entries().size());
    const auto add_step = [&](std::size_t index) {
      const Segment& segment = layout.segments()[index];
      for (std::size_t i = 0; i < segment.parameters.size(); ++i)
        places_[first + segment.parameters[i]] = {steps_.size(), i, segment.parameters[i]};
      steps_.push_back({part.gradients.get(), index, segment.parameters.size(),
                        std::vector<at::Tensor>(segment.parameters.size())});
    };
    for (std::size_t index = layout.shared(); index-- > 0;) add_step(index);
    add_step(layout.shared());
    if (part.gradients->owes()) owed_.push_back(part.gradients.get());
    part.gradients->set_owes(false);
  }
}

void GradientStream::add(std::size_t trained, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const Place& place = places_[trained];
  Step& step = steps_[place.step];
  step.gradients->check_dense(place.entry, gradient);
  step.arrived[place.position] = std::move(gradient);
  --step.missing;
  while (alone_ && next_ < steps_.size() && steps_[next_].missing == 0) reduce_next();
}

void GradientStream::reduce_next() {
  const StepPartScope scope = unit_.operations();
  Step& step = steps_[next_++];
  step.gradients->reduce(step.segment, std::move(step.arrived));
}

std::size_t GradientStream::complete() const {
  std::size_t count = next_;
  while (count < steps_.size() && steps_[count].missing == 0) ++count;
  return count;
}

/// The answer is awaited one point later, when it has long arrived.
void GradientStream::pass_point(const collective::Group& group) {
  if (alone_ || next_ == steps_.size()) return;
  const at::NoGradGuard no_grad;
  if (all_complete_.valid()) {
    const auto count = static_cast<std::size_t>(std::exchange(all_complete_, {}).wait().item<std::int64_t>());
    while (next_ < count) reduce_next();
  }
  if (next_ == steps_.size()) return;
  const at::Tensor mine = at::full({1}, static_cast<std::int64_t>(complete()), at::kLong);
  all_complete_ = group.all_reduce(mine, collective::kMin);
}

void GradientStream::finish() {
  const bool began = alone_ || next_ > 0;
  while (next_ < steps_.size()) reduce_next();
  if (began) return;  // a sum may have grown after its segment was reduced
  for (const Step& step : steps_) step.gradients->set_owes(false);
}

void GradientStream::abandon() {
  for (GradientShards* gradients : owed_) gradients->set_owes(true);
}

}  // namespace torchspan::sharded
