#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <torchspan/optim.h>
#include <torchspan/rpc/batcher.h>
#include <torchspan/rpc/rref.h>
#include <torchspan/rpc/worker.h>

namespace cart_pole {

/// What one actor saw in a round of T time steps with K carts.
struct Rollout {
  static constexpr torchspan::FixedString kWireName = "Rollout";
  at::Tensor states;   ///< float [T + 1, K, 4]
  at::Tensor actions;  ///< int64 [T, K]
  at::Tensor failed;   ///< bool [T, K]: the episode ended with this step, and the reward with it
  at::Tensor over;     ///< bool [T, K]: failed, or complete

  /// The mean number of steps of the carts' first episodes; those that last longer than the round count as T.
  double episode_length() const;
};

/// Puts the carts of all actors side by side.
Rollout join(const std::vector<Rollout>& rollouts);

/// The learning curve: lines with the length of an episode after each tenth of the rounds.
std::string draw_curve(const std::vector<double>& lengths);

struct AgentOptions {
  std::int64_t actors = 1;
  std::uint64_t seed = 1;
  double lr = 0.003;
  double discount = 0.99;
  std::int64_t passes = 10;  ///< over the data of a round
};

/// A policy and an estimate of its future reward, on the worker that learns. Actors call it at every time step; it answers
/// when all have called, from one forward for all of them.
class AgentImpl : public torch::nn::Module {
 public:
  AgentImpl(const torchspan::Worker& worker, AgentOptions options);

  /// Draws an action, int64 [K], for each state, float [K, 4], of an actor. The future completes when every actor has
  /// called. Thread-safe.
  torchspan::Future<at::Tensor> select(std::int64_t actor, const at::Tensor& states);
  /// Improves the policy with the data of a round (Schulman et al., "Proximal policy optimization algorithms", 2017).
  /// Returns the loss of the last pass.
  double learn(const Rollout& rollout);

 private:
  struct Request {
    std::int64_t actor;
    at::Tensor states;
  };
  /// Float [n, 2] log-probabilities of the actions and float [n] values of float [n, 4] states.
  std::pair<at::Tensor, at::Tensor> judge(const at::Tensor& states);
  /// Returns the actions of each request.
  std::vector<at::Tensor> answer(const std::vector<Request>& requests);

  const AgentOptions options_;
  at::Generator random_;
  torch::nn::Sequential policy_{nullptr}, value_{nullptr};
  std::optional<torchspan::optim::Optimizer> optimizer_;
  std::mutex mutex_;
  std::set<std::int64_t> waiting_;  ///< actors; guarded by mutex_
  torchspan::Batcher<Request, at::Tensor> requests_;
};
TORCH_MODULE(Agent);

/// AgentImpl::select() for actors on other workers.
torchspan::Future<at::Tensor> select_actions(const torchspan::RRef<Agent>& agent, std::int64_t actor,
                                             const at::Tensor& states);
inline constexpr torchspan::Function<select_actions> kSelectActions{"select_actions"};

}  // namespace cart_pole
