#include "cart_pole/physics.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace cart_pole {
namespace {

constexpr double kGravity = 9.8, kCartMass = 1, kPoleMass = 0.1, kHalfLength = 0.5;
constexpr double kForce = 10, kSeconds = 0.02;
constexpr double kFarthest = 2.4, kSteepest = 12 * 3.14159265358979323846 / 180;

}  // namespace

Carts::Carts(std::int64_t count, std::uint64_t seed)
    : random_(at::detail::createCPUGenerator(seed)),
      states_(begin(count)),
      ages_(at::zeros({count}, at::kLong)) {}

at::Tensor Carts::begin(std::int64_t count) {
  return at::rand({count, 4}, random_, at::TensorOptions(at::kDouble)) * 0.1 - 0.05;
}

Carts::Ended Carts::step(const at::Tensor& actions) {
  const auto parts = states_.unbind(1);
  const at::Tensor &position = parts[0], &velocity = parts[1], &angle = parts[2], &spin = parts[3];
  constexpr double kMass = kCartMass + kPoleMass;
  const at::Tensor force = (actions * 2 - 1) * kForce, sine = angle.sin(), cosine = angle.cos();
  const at::Tensor pushed = (force + kPoleMass * kHalfLength * spin.square() * sine) / kMass;
  const at::Tensor spin_change =
      (kGravity * sine - cosine * pushed) / (kHalfLength * (4.0 / 3 - kPoleMass * cosine.square() / kMass));
  const at::Tensor acceleration = pushed - kPoleMass * kHalfLength * spin_change * cosine / kMass;
  states_ = at::stack({position + kSeconds * velocity, velocity + kSeconds * acceleration,
                       angle + kSeconds * spin, spin + kSeconds * spin_change},
                      1);
  ages_ += 1;
  Ended ended;
  ended.failed = (states_.select(1, 0).abs() > kFarthest) | (states_.select(1, 2).abs() > kSteepest);
  ended.complete = (ages_ >= kLongestEpisode) & ~ended.failed;
  const at::Tensor over = ended.failed | ended.complete;
  states_ = at::where(over.unsqueeze(1), begin(states_.size(0)), states_);
  ages_ = ages_ * ~over;
  return ended;
}

}  // namespace cart_pole
