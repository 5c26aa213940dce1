// Restoring into living optimizers of LibTorch: they then hold exactly what the checkpoint holds.
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/optim/functional.h>

#include "tests/support/processes.h"

namespace torchspan::checkpoint::rollback_test {
namespace {

using TorchAdam = optim::FromTorch<torch::optim::Adam, torch::optim::AdamOptions, "rollback.Adam">;
using torchspan::testing::TemporaryFolder;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    const at::NoGradGuard no_grad;
    layer = register_module("layer", torch::nn::Linear(3, 2));
    late = register_module("late", torch::nn::Linear(2, 1));
    for (at::Tensor& parameter : parameters())
      parameter.copy_(at::arange(parameter.numel()).sin().reshape(parameter.sizes()));
  }
  at::Tensor forward(int step, bool all) {
    const at::Tensor x = layer(at::arange(6, at::kFloat).add(step).cos().reshape({2, 3}));
    return (all ? late(x) : x).pow(2).mean();
  }
  torch::nn::Linear layer{nullptr}, late{nullptr};
};
TORCH_MODULE(Net);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  return {
      {"Adam",
       [](auto parameters) { return std::make_unique<Adam>(parameters, AdamOptions(0.1).amsgrad(true)); }},
      {"AdamW", [](auto parameters) { return std::make_unique<AdamW>(parameters, AdamWOptions(0.1)); }},
      {"SGD",
       [](auto parameters) { return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9)); }},
      {"RMSprop",
       [](auto parameters) {
         return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.1).momentum(0.5));
       }},
      {"Adagrad", [](auto parameters) { return std::make_unique<Adagrad>(parameters, AdagradOptions(0.1)); }},
  };
}

/// To undefined, as Optimizer::zero_grad() does in some releases only.
void clear_gradients(Net& net) {
  for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
}

/// Trains; in the steps before `all_from` the late layer has no gradients, so it gets its state later than the other.
template <class Optimizer>
void train(Net& net, Optimizer& optimizer, int from, int to, int all_from) {
  for (int step = from; step < to; ++step) {
    clear_gradients(net);
    net(step, step >= all_from).backward();
    optimizer.step();
  }
}

template <class Optimizer>
void poison(Net& net, Optimizer& optimizer) {
  clear_gradients(net);
  (net(0, true) * std::numeric_limits<float>::quiet_NaN()).backward();
  optimizer.step();
}

/// Whether training from a checkpoint of step `saved`, restored into objects that have trained on, gives the same bits.
template <class Optimizer>
void expect_exact_rollback(Optimizer& optimizer, Net& net, int saved, const std::string& what) {
  constexpr int kSteps = 5, kAllFrom = 2;
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path()});
  manager.add("model", net);
  manager.add("optimizer", optimizer);
  train(net, optimizer, 0, saved, kAllFrom);
  manager.save(saved);
  train(net, optimizer, saved, kSteps, kAllFrom);
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& parameter : net->parameters()) wanted.push_back(parameter.detach().clone());
  poison(net, optimizer);
  EXPECT_EQ(manager.restore(), saved);
  train(net, optimizer, saved, kSteps, kAllFrom);
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(at::equal(parameters[i].detach(), wanted[i]))
        << what << " from step " << saved << ", parameter " << i;
}

TEST(Rollback, OfLibTorchsOptimizersIsExactAlsoBeforeAParameterHasState) {
  for (const auto& [name, make] : optimizers()) {
    for (const int saved : {0, 1, 2, 3}) {
      Net net;
      const auto optimizer = make(net->parameters());
      expect_exact_rollback(*optimizer, net, saved, name);
    }
  }
}

TEST(Rollback, OfAdaptedAndOwnOptimizersIsExact) {
  for (const int saved : {0, 1, 2, 3}) {
    Net adapted, own;
    optim::Optimizer from_torch(*adapted, TorchAdam(torch::optim::AdamOptions(0.1)));
    expect_exact_rollback(from_torch, adapted, saved, "FromTorch");
    optim::Optimizer adam(*own, optim::Adam({.lr = 0.1}));
    expect_exact_rollback(adam, own, saved, "Adam");
  }
}

TEST(Rollback, ThatFailsLeavesTheStateAsItWas) {
  const TemporaryFolder folder;
  Net small;
  torch::optim::Adam saved(small->layer->parameters(), torch::optim::AdamOptions(0.1));
  CheckpointManager manager({.directory = folder.path()});
  manager.add("optimizer", saved);
  manager.save(0);
  manager.wait();
  Net net;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(net->layer->parameters());
  groups.emplace_back(net->late->parameters());
  torch::optim::Adam other(groups, torch::optim::AdamOptions(0.1));
  train(net, other, 0, 3, 0);
  const std::size_t states = other.state().size();
  CheckpointManager reader({.directory = folder.path()});
  reader.add("optimizer", other);
  EXPECT_ANY_THROW(reader.restore());
  EXPECT_EQ(other.state().size(), states);
}

}  // namespace
}  // namespace torchspan::checkpoint::rollback_test
