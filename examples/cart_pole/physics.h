#pragma once
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace cart_pole {

inline constexpr std::int64_t kLongestEpisode = 500;  ///< time steps

/// Carts on which a pole balances, each pushed left or right at every time step of 20 ms (Barto, Sutton and Anderson,
/// "Neuronlike adaptive elements that can solve difficult learning control problems", 1983). An episode ends when the
/// cart is 2.4 m away from the center, when the pole leans by 12 degrees, or after 500 steps; the cart then begins another
/// one, close to upright and to the center.
class Carts {
 public:
  Carts(std::int64_t count, std::uint64_t seed);

  /// Double [count, 4]: position, velocity, angle, angular velocity, in meters, radians and seconds.
  const at::Tensor& states() const { return states_; }
  void set_states(const at::Tensor& states) { states_ = states.clone(); }

  /// What a step led to; bool [count].
  struct Ended {
    at::Tensor failed;    ///< the cart left its range, or the pole fell
    at::Tensor complete;  ///< the episode reached 500 steps
  };
  /// Pushes each cart with 10 N: int64 [count], 0 to the left, 1 to the right.
  Ended step(const at::Tensor& actions);

 private:
  at::Tensor begin(std::int64_t count);

  at::Generator random_;
  at::Tensor states_;
  at::Tensor ages_;  ///< int64 [count]: steps of the episode
};

}  // namespace cart_pole
