// Half and bfloat16 parameters with master weights, against the same optimizer over float32 parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim/distributed_optimizer.h>

#include "optim/functional/rule.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::optim::master_weights_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::error_of;

constexpr at::ScalarType kHalfTypes[] = {torch::kHalf, torch::kBFloat16};

std::vector<OptimizerSpec> dense_specs(bool m, std::optional<bool> f = std::nullopt) {
  return {SGD{.lr = 0.01, .foreach = f, .master_weights = m},
          SGD{.lr = 0.01,
              .momentum = 0.9,
              .weight_decay = 0.1,
              .nesterov = true,
              .foreach = f,
              .master_weights = m},
          Adagrad{.lr = 0.01, .lr_decay = 0.1, .weight_decay = 0.1, .foreach = f, .master_weights = m},
          Adam{.weight_decay = 0.1, .amsgrad = true, .foreach = f, .master_weights = m},
          AdamW{.maximize = true, .foreach = f, .master_weights = m},
          Adadelta{.foreach = f, .master_weights = m},
          RMSprop{.momentum = 0.9, .centered = true, .foreach = f, .master_weights = m},
          Rprop{.foreach = f, .master_weights = m},
          Adamax{.foreach = f, .master_weights = m}};
}

std::vector<OptimizerSpec> sparse_specs(bool m) {
  return {SGD{.lr = 0.01, .momentum = 0.9, .master_weights = m}, Adagrad{.master_weights = m},
          SparseAdam{.master_weights = m}};
}

at::Tensor leaf_of(const at::Tensor& value) { return value.detach().clone().set_requires_grad(true); }

void step(FunctionalOptimizer& optimizer, const at::Tensor& gradient) {
  optimizer.step(std::vector<at::Tensor>{gradient});
}

/// Steps a parameter of `dtype` with master weights and a float32 one with the same gradients.
void expect_rounded_float32(const OptimizerSpec& with, const OptimizerSpec& without, at::ScalarType dtype,
                            bool sparse) {
  SCOPED_TRACE(::testing::Message() << with.kind << ", " << dtype << (sparse ? ", sparse" : ""));
  at::Generator generator = at::detail::createCPUGenerator(11);
  const at::Tensor half = leaf_of(at::randn({40, 3}, generator, torch::kFloat).to(dtype));
  const at::Tensor full = leaf_of(half.to(torch::kFloat));
  const auto ours = with.build({half}), oracle = without.build({full});
  for (std::uint32_t count = 1; count <= 10; ++count) {
    at::Tensor gradient = at::randn({40, 3}, generator, torch::kFloat).to(dtype);
    if (sparse) {
      const at::Tensor rows = at::randint(40, {1, 5}, generator, torch::kLong);
      gradient = torch::sparse_coo_tensor(rows, gradient.narrow(0, 0, 5), {40, 3});
    }
    step(*ours, gradient);
    step(*oracle, gradient.to(torch::kFloat));
    EXPECT_TRUE(half.equal(full.to(dtype)));
    EXPECT_TRUE(ours->state(0).at("master_weight").equal(full));
    EXPECT_EQ(half._version(), count);
  }
  const ParameterState state = ours->state(0);
  for (const auto& [name, tensor] : oracle->state(0)) {
    const bool is_sparse = tensor.is_sparse();
    EXPECT_TRUE(at::equal(is_sparse ? state.at(name).to_dense() : state.at(name),
                          is_sparse ? tensor.to_dense() : tensor))
        << name;
  }
}

TEST(MasterWeights, AreTheParametersOfAFloat32Optimizer) {
  for (const auto dtype : kHalfTypes) {
    const auto with = dense_specs(true), at_once = dense_specs(true, true), without = dense_specs(false);
    for (std::size_t k = 0; k < with.size(); ++k) {
      expect_rounded_float32(with[k], without[k], dtype, false);
      expect_rounded_float32(at_once[k], without[k], dtype, false);
    }
  }
}

TEST(MasterWeights, TakeSparseGradients) {
  for (const auto dtype : kHalfTypes) {
    const auto with = sparse_specs(true), without = sparse_specs(false);
    for (std::size_t k = 0; k < with.size(); ++k) expect_rounded_float32(with[k], without[k], dtype, true);
  }
}

TEST(MasterWeights, AddUpUpdatesThatTheParameterCannotHold) {
  const at::Tensor rounded = leaf_of(torch::ones({3}, torch::kBFloat16)), precise = leaf_of(rounded);
  const auto without = SGD{.lr = 1e-4, .float32_state = true}.build({rounded});
  const auto with = SGD{.lr = 1e-4, .master_weights = true}.build({precise});
  for (int i = 0; i < 1000; ++i) {
    step(*without, torch::ones({3}, torch::kBFloat16));
    step(*with, torch::ones({3}, torch::kBFloat16));
  }
  EXPECT_TRUE(rounded.equal(torch::ones({3}, torch::kBFloat16)));
  EXPECT_TRUE(precise.equal(torch::full({3}, 0.9, torch::kBFloat16)));
}

TEST(MasterWeights, ChangeNothingForParametersOfOtherTypes) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kComplexFloat}) {
    const auto with = dense_specs(true), without = dense_specs(false);
    for (std::size_t k = 0; k < with.size(); ++k) {
      const at::Tensor value = torch::randn({5}, dtype), gradient = torch::randn({5}, dtype);
      const at::Tensor a = leaf_of(value), b = leaf_of(value);
      const auto ours = with[k].build({a}), plain = without[k].build({b});
      step(*ours, gradient);
      step(*plain, gradient);
      EXPECT_TRUE(a.equal(b)) << with[k].kind;
      EXPECT_EQ(ours->state(0).count("master_weight"), 0U);
    }
  }
}

TEST(MasterWeights, TakeOverTheElementsThatSomethingElseChanged) {
  const at::Tensor leaf = leaf_of(torch::ones({4}, torch::kBFloat16)),
                   ones = torch::ones({4}, torch::kBFloat16);
  const auto optimizer = SGD{.lr = 1e-3, .master_weights = true}.build({leaf});
  step(*optimizer, ones);
  const at::Tensor before = optimizer->state(0).at("master_weight").clone();
  {
    at::NoGradGuard no_grad;
    leaf[1] = 8;
  }
  step(*optimizer, ones);
  at::Tensor expected = before - 1e-3;
  expected[1] = 8 - 1e-3;
  const at::Tensor master = optimizer->state(0).at("master_weight");
  EXPECT_TRUE(at::allclose(master, expected, /*rtol=*/0, /*atol=*/1e-6));
  EXPECT_TRUE(leaf.equal(master.to(torch::kBFloat16)));
}

TEST(MasterWeights, LoseNoStepOfTwoOptimizersThatShareAParameter) {
  const at::Tensor shared = leaf_of(torch::ones({4}, torch::kBFloat16)),
                   ones = torch::ones({4}, torch::kBFloat16);
  const auto first = SGD{.lr = 0.5, .master_weights = true}.build({shared});
  const auto second = SGD{.lr = 0.25, .master_weights = true}.build({shared});
  for (int i = 0; i < 4; ++i) {
    step(*first, ones);
    step(*second, ones);
  }
  EXPECT_TRUE(shared.equal(torch::full({4}, -2, torch::kBFloat16)));
}

TEST(MasterWeights, TravelWithTheSpec) {
  std::vector<OptimizerSpec> all = dense_specs(true);
  all.push_back(SparseAdam{.master_weights = true});
  for (const OptimizerSpec& spec : all) {
    wire::Payload payload = wire::to_payload(spec);
    const OptimizerSpec arrived = wire::from_payload<OptimizerSpec>(payload);
    const auto optimizer = OptimizerTable().build(arrived, {leaf_of(torch::ones({2, 2}, torch::kHalf))});
    const at::Tensor gradient = torch::ones({2, 2}, torch::kHalf);
    step(*optimizer, spec.kind == "SparseAdam" ? gradient.to_sparse(1) : gradient);
    EXPECT_EQ(optimizer->state(0).count("master_weight"), 1U) << spec.kind;
  }
}

TEST(MasterWeights, AreSavedAndLoadedWithTheState) {
  const at::Tensor one = leaf_of(torch::ones({4}, torch::kBFloat16)), two = leaf_of(one);
  const at::Tensor gradient = torch::full({4}, 0.3, torch::kBFloat16);
  const Adam options{.lr = 1e-4, .master_weights = true};
  Optimizer first({one}, options), second({two}, options);
  const auto train = [&](Optimizer& optimizer, const at::Tensor& leaf) {
    leaf.mutable_grad() = gradient;
    optimizer.step();
  };
  for (int i = 0; i < 5; ++i) train(first, one);
  const StateDict state = first.state_dict();
  const at::Tensor* master = state.find("group.0.parameter.0.master_weight");
  ASSERT_NE(master, nullptr);
  EXPECT_EQ(master->scalar_type(), torch::kFloat);
  second.load_state_dict(state);
  {
    at::NoGradGuard no_grad;
    two.copy_(one);
  }
  for (int i = 0; i < 5; ++i) {
    train(first, one);
    train(second, two);
  }
  EXPECT_TRUE(two.equal(one));
  const StateDict ours = first.state_dict(), theirs = second.state_dict();
  EXPECT_TRUE(ours["group.0.parameter.0.master_weight"].equal(theirs["group.0.parameter.0.master_weight"]));
}

TEST(MasterWeights, AreMissedInAStateWithoutThemAndRejectedByAnOptimizerWithoutThem) {
  const at::Tensor leaf = leaf_of(torch::ones({4}, torch::kBFloat16));
  Optimizer with({leaf}, Adam{.master_weights = true}), without({leaf}, Adam{.float32_state = true});
  leaf.mutable_grad() = torch::ones({4}, torch::kBFloat16);
  with.step();
  without.step();
  const StateDict before = with.state_dict();
  EXPECT_THAT(error_of([&] { with.load_state_dict(without.state_dict()); }).what(),
              AllOf(HasSubstr("'master_weight' of parameter 0"), HasSubstr("is missing")));
  EXPECT_TRUE(with.state_dict()["group.0.parameter.0.master_weight"].equal(
      before["group.0.parameter.0.master_weight"]));
  EXPECT_THAT(error_of([&] { without.load_state_dict(before); }).what(),
              AllOf(HasSubstr("'master_weight' of parameter 0"), HasSubstr("does not belong")));
  ParameterState wrong{{"step", torch::ones({}, torch::kLong)},
                       {"master_weight", torch::ones({4}, torch::kBFloat16)}};
  const auto sgd = SGD{.lr = 1, .master_weights = true}.build({leaf_of(leaf)});
  EXPECT_THAT(error_of([&] { sgd->load_state(0, wrong); }).what(), HasSubstr("must have shape [4], Float"));
}

/// A rule for which LibTorch has no kernel of the dtype.
class NoKernel final : public RuleOptimizer {
 public:
  NoKernel(RuleSettings settings, std::vector<at::Tensor> parameters)
      : RuleOptimizer("NoKernel", std::move(settings), std::move(parameters)) {}

 private:
  static void refuse(const at::Tensor& parameter) {
    TORCH_CHECK(parameter.scalar_type() != at::kHalf, "\"no_cpu\" not implemented for 'Half'");
  }
  void apply(const Operands<at::Tensor>& on) const override { refuse(on.parameter); }
  void apply(const Operands<Tensors>& on) const override { refuse(on.parameter[0]); }
  std::string refuse_sparse_rule() const override { return ""; }
};

TEST(MasterWeights, AreAdvisedWhereLibTorchHasNoKernelOfTheDtype) {
  for (const bool foreach : {true, false}) {
    for (const bool precise : {true, false}) {
      NoKernel optimizer({.slots = {}, .foreach = foreach, .float32_state = precise},
                         {leaf_of(torch::ones({3}, torch::kHalf)), leaf_of(torch::ones({2}, torch::kHalf))});
      optimizer.set_parameter_names({"a", "b"});
      const std::vector<at::Tensor> gradients{torch::ones({3}, torch::kHalf), torch::ones({2}, torch::kHalf)};
      if (precise) {
        EXPECT_NO_THROW(optimizer.step(gradients));
        continue;
      }
      EXPECT_THAT(error_of([&] { optimizer.step(gradients); }).message(),
                  AllOf(HasSubstr("parameter 0 'a'"), HasSubstr("not implemented for 'Half'"),
                        HasSubstr("set float32_state or master_weights")));
    }
  }
}

at::Tensor make_half_leaf() { return leaf_of(torch::ones({3}, torch::kBFloat16)); }
at::Tensor times(const RRef<at::Tensor>& leaf, const at::Tensor& x) { return x * leaf.local_value(); }
constexpr Function<make_half_leaf> kMakeHalfLeaf{"make_half_leaf"};
constexpr Function<times> kTimes{"times"};

TEST(MasterWeights, LiveOnTheOwnersOfADistributedOptimizer) {
  testing::ClusterOptions options;
  options.workers = 2;
  options.functions.add(kMakeHalfLeaf, kTimes);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    extensions.push_back(std::make_unique<OptimExtension>());
    return extensions;
  };
  testing::SimCluster(options).run([](Worker& worker) {
    if (worker.rank() != 0) return;
    const SGD sgd{.lr = 1e-4, .momentum = 0.9, .master_weights = true};
    const at::Tensor local = make_half_leaf();
    auto remote = worker.remote("worker1", kMakeHalfLeaf);
    Optimizer oracle({local}, sgd);
    DistributedOptimizer optimizer(worker, sgd, {remote});
    for (int i = 0; i < 50; ++i) {
      autograd::Context context(worker);
      context.backward(remote.rpc_sync(kTimes, torch::ones({3})).sum());
      optimizer.step(context);
      local.mutable_grad() = torch::ones({3}, torch::kBFloat16);
      oracle.step();
    }
    EXPECT_TRUE(remote.to_here().equal(local));
    EXPECT_LT(local.max().item<float>(), 0.99);
    at::Tensor master;
    for (const auto& item : optimizer.state_dict()) {
      if (item.key().ends_with(".master_weight")) master = item.value();
    }
    ASSERT_TRUE(master.defined());
    EXPECT_TRUE(master.equal(oracle.state_dict()["group.0.parameter.0.master_weight"]));
  });
}

}  // namespace
}  // namespace torchspan::optim::master_weights_test
