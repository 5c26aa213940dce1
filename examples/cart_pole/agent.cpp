#include "cart_pole/agent.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include <torchspan/optim/algorithms.h>

namespace cart_pole {
namespace {

constexpr auto kLongestWait = std::chrono::seconds(60);  // of an actor for the others
constexpr double kTraceDecay = 0.95, kMostRatio = 1.2, kLeastRatio = 0.8, kEntropyShare = 0.01;

torch::nn::Sequential make_network(std::int64_t outputs) {
  constexpr std::int64_t kHidden = 64;
  return torch::nn::Sequential(torch::nn::Linear(4, kHidden), torch::nn::Tanh(),
                               torch::nn::Linear(kHidden, kHidden), torch::nn::Tanh(),
                               torch::nn::Linear(kHidden, outputs));
}

}  // namespace

double Rollout::episode_length() const {
  const std::int64_t steps = over.size(0);
  const at::Tensor first = over.to(at::kLong).argmax(0) + 1;
  return at::where(over.any(0), first, at::full_like(first, steps)).to(at::kDouble).mean().item<double>();
}

Rollout join(const std::vector<Rollout>& rollouts) {
  const auto side_by_side = [&](at::Tensor Rollout::*part) {
    std::vector<at::Tensor> parts;
    for (const Rollout& rollout : rollouts) parts.push_back(rollout.*part);
    return at::cat(parts, 1);
  };
  return {side_by_side(&Rollout::states), side_by_side(&Rollout::actions), side_by_side(&Rollout::failed),
          side_by_side(&Rollout::over)};
}

std::string draw_curve(const std::vector<double>& lengths) {
  const std::size_t every = std::max<std::size_t>(1, lengths.size() / 10);
  std::string text;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (i != 0 && (i + 1) % every != 0 && i + 1 != lengths.size()) continue;
    text += fmt::format("  round {:3}  {:5.1f}  {:#<{}}\n", i + 1, lengths[i], "",
                        static_cast<int>(lengths[i] / 10));
  }
  return text;
}

AgentImpl::AgentImpl(const torchspan::Worker& worker, AgentOptions options)
    : options_(options),
      random_(at::detail::createCPUGenerator(options.seed)),
      requests_(worker, [this](const std::vector<Request>& requests) { return answer(requests); },
                {.max_size = static_cast<std::size_t>(options.actors), .max_delay = kLongestWait}) {
  policy_ = register_module("policy", make_network(2));
  value_ = register_module("value", make_network(1));
  optimizer_.emplace(*this, torchspan::optim::Adam{.lr = options.lr});
}

std::pair<at::Tensor, at::Tensor> AgentImpl::judge(const at::Tensor& states) {
  return {policy_->forward(states).log_softmax(1), value_->forward(states).squeeze(1)};
}

torchspan::Future<at::Tensor> AgentImpl::select(std::int64_t actor, const at::Tensor& states) {
  {
    const std::lock_guard lock(mutex_);
    if (actor < 0 || actor >= options_.actors || !waiting_.insert(actor).second) {
      throw torchspan::Error(
          torchspan::ErrorKind::kInvalid,
          fmt::format("actor {} of {} called while it waits, or does not exist", actor, options_.actors));
    }
  }
  return requests_.add({actor, states});
}

std::vector<at::Tensor> AgentImpl::answer(const std::vector<Request>& requests) {
  // In the order of the actors, so that they draw the same numbers whoever calls first.
  std::map<std::int64_t, std::size_t> places;
  for (std::size_t i = 0; i < requests.size(); ++i) places.emplace(requests[i].actor, i);
  {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
  }
  if (static_cast<std::int64_t>(places.size()) != options_.actors) {
    throw torchspan::Error(torchspan::ErrorKind::kTimedOut,
                           fmt::format("{} of {} actors called within {} s", places.size(), options_.actors,
                                       torchspan::to_seconds(kLongestWait)));
  }
  const c10::NoGradGuard off;
  std::vector<at::Tensor> states;
  std::vector<std::int64_t> counts;
  for (const auto& [actor, place] : places) {
    states.push_back(requests[place].states);
    counts.push_back(requests[place].states.size(0));
  }
  const at::Tensor drawn = judge(at::cat(states)).first.exp().multinomial(1, false, random_).squeeze(1);
  const std::vector<at::Tensor> parts = drawn.split_with_sizes(counts);
  std::vector<at::Tensor> actions(requests.size());
  std::size_t part = 0;
  for (const auto& [actor, place] : places) actions[place] = parts[part++].clone();
  return actions;
}

double AgentImpl::learn(const Rollout& rollout) {
  const std::int64_t steps = rollout.actions.size(0), carts = rollout.actions.size(1);
  const at::Tensor states = rollout.states.slice(0, 0, steps).reshape({-1, 4});
  const at::Tensor actions = rollout.actions.reshape({-1, 1});
  at::Tensor before, advantages, returns;
  {
    const c10::NoGradGuard off;
    before = judge(states).first.gather(1, actions).squeeze(1);
    const at::Tensor values = judge(rollout.states.reshape({-1, 4})).second.reshape({steps + 1, carts});
    advantages = at::empty({steps, carts});
    at::Tensor later = at::zeros({carts});
    for (std::int64_t t = steps - 1; t >= 0; --t) {
      // After a complete episode, the next state belongs to another one: the value of this state stands for it.
      const at::Tensor next = at::where(rollout.over[t], values[t], values[t + 1]) * ~rollout.failed[t];
      later = 1 + options_.discount * next - values[t] +
              options_.discount * kTraceDecay * later * ~rollout.over[t];
      advantages[t] = later;
    }
    returns = (advantages + values.slice(0, 0, steps)).reshape({-1});
    advantages = advantages.reshape({-1});
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8);
  }
  double last = 0;
  for (std::int64_t pass = 0; pass < options_.passes; ++pass) {
    const auto [probabilities, values] = judge(states);
    const at::Tensor ratio = (probabilities.gather(1, actions).squeeze(1) - before).exp();
    const at::Tensor gain =
        at::min(ratio * advantages, ratio.clamp(kLeastRatio, kMostRatio) * advantages).mean();
    const at::Tensor entropy = -(probabilities.exp() * probabilities).sum(1).mean();
    const at::Tensor loss = (values - returns).square().mean() - gain - kEntropyShare * entropy;
    optimizer_->zero_grad();
    loss.backward();
    optimizer_->step();
    last = loss.item<double>();
  }
  return last;
}

torchspan::Future<at::Tensor> select_actions(const torchspan::RRef<Agent>& agent, std::int64_t actor,
                                             const at::Tensor& states) {
  return agent.local_value()->select(actor, states);
}

}  // namespace cart_pole
