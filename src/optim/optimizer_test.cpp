#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/functional.h>

#include "tests/support/errors.h"

namespace torchspan::optim::optimizer_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::error_of;

using TorchAdam = FromTorch<torch::optim::Adam, torch::optim::AdamOptions, "torch.Adam">;
using TorchSGD = FromTorch<torch::optim::SGD, torch::optim::SGDOptions, "torch.SGD">;

torch::nn::Sequential network(std::uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Tanh(), torch::nn::Linear(3, 2));
  net->to(torch::kDouble);
  return net;
}

void pass(torch::nn::Sequential& net, std::uint64_t step) {
  at::Generator generator = at::detail::createCPUGenerator(step);
  net->forward(at::randn({5, 4}, generator, torch::kDouble)).square().sum().backward();
}

void expect_same(torch::nn::Sequential& a, torch::nn::Sequential& b) {
  const auto ours = a->parameters(), theirs = b->parameters();
  for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].equal(theirs[i])) << "parameter " << i;
}

TEST(Optimizer, TrainsAModuleLikeLibTorchsWithClippingAndGroups) {
  auto ours = network(1), theirs = network(1);
  const auto mine = ours->parameters(), list = theirs->parameters();
  Optimizer optimizer(
      {ParamGroup({mine[0], mine[2]}, Adam{.lr = 0.1}), ParamGroup({mine[1], mine[3]}, SGD{.lr = 0.5})});
  torch::optim::Adam weights({list[0], list[2]}, torch::optim::AdamOptions(0.1));
  torch::optim::SGD biases({list[1], list[3]}, torch::optim::SGDOptions(0.5));
  for (std::uint64_t step = 0; step < 20; ++step) {
    optimizer.zero_grad(step % 2 == 0);
    theirs->zero_grad();
    pass(ours, step);
    pass(theirs, step);
    const double norm = torch::nn::utils::clip_grad_norm_(list, 0.7);
    EXPECT_NEAR(optimizer.clip_grad_norm(0.7), norm, 1e-12 * norm);
    optimizer.step();
    weights.step();
    biases.step();
    if (step != 10) continue;
    optimizer.set_lr(0, 0.01);
    static_cast<torch::optim::AdamOptions&>(weights.param_groups()[0].options()).lr(0.01);
  }
  for (std::size_t i = 0; i < list.size(); ++i) EXPECT_TRUE(at::allclose(mine[i], list[i], 1e-12, 1e-12));
  EXPECT_THAT(optimizer.lrs(), ElementsAre(0.01, 0.5));
}

TEST(Optimizer, NormsAreThoseOfOneLongVector) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const std::vector<at::Tensor> list = {at::randn({3, 2}, generator, torch::kDouble), at::Tensor(),
                                        at::randn({4}, generator, torch::kDouble)};
  const at::Tensor whole = torch::cat({list[0].flatten(), list[2]});
  for (const double type : {1.0, 2.0, 3.0, double(INFINITY)}) {
    EXPECT_NEAR(gradient_norm(list, type), whole.norm(type).item<double>(), 1e-12);
  }
  const at::Tensor twice =
      torch::sparse_coo_tensor(torch::tensor({{1, 1}}), torch::tensor({3.0, 1.0}, torch::kDouble), {4});
  EXPECT_EQ(gradient_norm({twice}), 4);
  EXPECT_THAT(error_of([&] { gradient_norm(list, 0); }).what(), HasSubstr("norm_type = 0"));
  EXPECT_THAT(error_of([&] { clip_grad_norm({}, -1); }).what(), HasSubstr("max_norm = -1"));
}

TEST(Optimizer, ClipsAGradientOnceWhoseParameterIsListedTwice) {
  at::Tensor value = torch::zeros({2}, torch::kDouble).set_requires_grad(true);
  value.mutable_grad() = torch::tensor({3.0, 4.0}, torch::kDouble);
  EXPECT_EQ(clip_grad_norm({value, value}, 1), 5);
  EXPECT_NEAR(gradient_norm({value.grad()}), 1, 1e-6);
}

std::vector<OptimizerSpec> specs() {
  return {SGD{.lr = 0.1},
          SGD{.lr = 0.1, .momentum = 0.9},
          Adam{.amsgrad = true},
          AdamW{},
          Adagrad{},
          Adadelta{},
          RMSprop{.momentum = 0.9, .centered = true},
          Rprop{},
          Adamax{},
          TorchAdam{torch::optim::AdamOptions(0.1)}};
}

TEST(Optimizer, GoesOnFromASavedStateBitForBit) {
  for (const OptimizerSpec& spec : specs()) {
    SCOPED_TRACE(spec.kind);
    auto straight = network(2), resumed = network(2);
    Optimizer whole(*straight, spec), before(*resumed, spec);
    const auto train = [](torch::nn::Sequential& net, Optimizer& optimizer, std::uint64_t from,
                          std::uint64_t to) {
      for (std::uint64_t step = from; step < to; ++step) {
        optimizer.zero_grad();
        pass(net, step);
        net->parameters()[1].mutable_grad().reset();  // one parameter never steps
        optimizer.step();
      }
    };
    train(straight, whole, 0, 12);
    train(resumed, before, 0, 5);
    before.set_lr(whole.lr());
    std::stringstream file;
    torch::save(before.state_dict(), file);
    StateDict loaded;
    torch::load(loaded, file);
    Optimizer after(*resumed, spec);
    after.set_lr(3);  // the state restores the rate
    after.load_state_dict(loaded);
    EXPECT_EQ(after.lr(), whole.lr());
    train(resumed, after, 5, 12);
    expect_same(resumed, straight);
  }
}

TEST(Optimizer, MayHaveNoParametersAsOnAPipelineStageWithoutAny) {
  for (const OptimizerSpec& spec : specs()) {
    SCOPED_TRACE(spec.kind);
    const std::vector<at::Tensor> none;
    Optimizer optimizer(none, spec), other(none, spec);
    optimizer.zero_grad();
    EXPECT_EQ(optimizer.clip_grad_norm(1), 0);
    optimizer.step();
    optimizer.set_lr(0.25);
    other.load_state_dict(optimizer.state_dict());
    EXPECT_EQ(other.lr(), 0.25);
    EXPECT_TRUE(other.parameters().empty());
  }
}

TEST(Optimizer, SavesSparseMomentum) {
  const at::Tensor table = torch::ones({4, 2}, torch::kDouble).set_requires_grad(true);
  Optimizer optimizer({table}, SGD{.lr = 0.1, .momentum = 0.9});
  table.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{1, 1}}), torch::ones({2, 2}, torch::kDouble), {4, 2});
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer.state_dict(), file);
  StateDict loaded;
  torch::load(loaded, file);
  const at::Tensor& buffer = loaded["group.0.parameter.0.momentum_buffer"];
  EXPECT_TRUE(buffer.is_sparse());
  EXPECT_TRUE(
      buffer.to_dense().equal(optimizer.state_dict()["group.0.parameter.0.momentum_buffer"].to_dense()));
  optimizer.load_state_dict(loaded);
  optimizer.step();
  EXPECT_NEAR(table[1][0].item<double>(), 1 - 0.1 * 2 - 0.1 * (0.9 * 2 + 2), 1e-12);
}

TEST(Optimizer, RefusesAStateThatDoesNotFitNamingTheParameterAndKeepsItsOwn) {
  auto net = network(3);
  Optimizer optimizer(*net, Adam{});
  pass(net, 1);
  optimizer.step();
  const StateDict good = optimizer.state_dict();
  const auto text_of = [&](const std::string& key, const at::Tensor& value) {
    StateDict bad;
    for (const auto& entry : good) {
      if (entry.key() != key) bad.insert(entry.key(), entry.value());
    }
    if (value.defined()) bad.insert(key, value);
    return std::string(error_of([&] { optimizer.load_state_dict(bad); }).what());
  };
  const std::string path = "group.0.parameter.2.weight.";
  EXPECT_THAT(
      text_of(path + "exp_avg", torch::zeros({7}, torch::kDouble)),
      AllOf(HasSubstr("'exp_avg' of parameter 2 '2.weight' (shape [2, 3], Double)"), HasSubstr("[7]")));
  EXPECT_THAT(text_of(path + "exp_avg", {}), AllOf(HasSubstr("'2.weight'"), HasSubstr("missing")));
  EXPECT_THAT(text_of(path + "buffer", torch::zeros({2, 3}, torch::kDouble)),
              HasSubstr("'buffer' of parameter 2"));
  EXPECT_THAT(text_of("group.0.parameter.9.weight.step", torch::tensor(1)), HasSubstr("9.weight"));
  EXPECT_THAT(text_of("group.0.lr", {}), HasSubstr("'group.0.lr'"));
  EXPECT_THAT(text_of("group.0.lr", torch::tensor(-1.0)), HasSubstr("lr = -1"));
  EXPECT_THAT(error_of([&] { optimizer.load_state_dict(Optimizer(*net, AdamW{}).state_dict()); }).what(),
              AllOf(HasSubstr("'AdamW'"), HasSubstr("'Adam'")));
  const std::vector<at::Tensor> some = {net->parameters()[0]};
  const StateDict other = Optimizer({ParamGroup(some, Adam{}, {"0.weight"})}).state_dict();
  EXPECT_THAT(error_of([&] { optimizer.load_state_dict(other); }).what(), HasSubstr("'0.bias'"));
  const StateDict now = optimizer.state_dict();
  ASSERT_EQ(now.size(), good.size());
  for (const auto& entry : good) EXPECT_TRUE(now[entry.key()].equal(entry.value())) << entry.key();
}

TEST(Optimizer, RefusesGroupsThatShareAParameterOrDoNotFitTheirNames) {
  const at::Tensor a = torch::ones({2}).set_requires_grad(true), b = torch::ones({3}).set_requires_grad(true);
  EXPECT_THAT(error_of([] { Optimizer(std::vector<ParamGroup>()); }).what(), HasSubstr("at least one group"));
  EXPECT_THAT(error_of([&] {
                Optimizer({ParamGroup({a}, SGD{.lr = 1}), ParamGroup({b, a}, Adam{})});
              }).what(),
              HasSubstr("parameter 1 (shape [2], Float) of group 1 is in group 0 too"));
  EXPECT_THAT(error_of([&] {
                Optimizer({ParamGroup({a, b}, Adam{}, {"one"})});
              }).what(),
              HasSubstr("1 names"));
  EXPECT_THAT(error_of([&] {
                Optimizer({ParamGroup({a, b}, Adam{}, {"x", "x"})});
              }).what(),
              HasSubstr("two parameters 'x'"));
  EXPECT_THAT(error_of([&] { Optimizer({a}, OptimizerSpec()); }).what(), HasSubstr("spec is empty"));
}

/// A layer with parameters of integers, as quantized models have.
struct CodedImpl : torch::nn::Module {
  CodedImpl() {
    codes = register_parameter("codes", torch::arange(4), /*requires_grad=*/false);
    mask = register_parameter("mask", torch::ones({4}, torch::kBool), /*requires_grad=*/false);
    weight = register_parameter("weight", torch::ones({4}, torch::kDouble));
    frozen = register_parameter("frozen", torch::ones({4}, torch::kDouble), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return (x * weight * codes * mask * frozen).sum(); }
  at::Tensor codes, mask, weight, frozen;
};
TORCH_MODULE(Coded);

TEST(Optimizer, LeavesOutParametersOfIntegers) {
  for (const bool named : {true, false}) {
    Coded model;
    Optimizer optimizer =
        named ? Optimizer(*model, SGD({.lr = 0.5})) : Optimizer(model->parameters(), SGD({.lr = 0.5}));
    model->forward(torch::ones({4}, torch::kDouble)).backward();
    optimizer.step();
    EXPECT_TRUE(model->weight.equal(1 - 0.5 * torch::arange(4).to(torch::kDouble)));
    EXPECT_TRUE(model->codes.equal(torch::arange(4)));
    // A frozen parameter of floating-point numbers may be trained later.
    EXPECT_EQ(optimizer.parameters().size(), 2U);
    Optimizer same =
        named ? Optimizer(*model, SGD({.lr = 0.5})) : Optimizer(model->parameters(), SGD({.lr = 0.5}));
    same.load_state_dict(optimizer.state_dict());
  }
}

TEST(Optimizer, NamesAParameterThatItRefuses) {
  const at::Tensor weight = torch::ones({2}, torch::kDouble).requires_grad_();
  const auto text = [&](std::vector<at::Tensor> parameters) {
    std::vector<ParamGroup> groups{
        ParamGroup(std::move(parameters), SGD({.lr = 0.1}), {"layer.weight", "layer.bias"})};
    return error_of([&] { Optimizer(std::move(groups)); }).message();
  };
  EXPECT_THAT(text({weight, weight * 2}),
              AllOf(HasSubstr("'layer.bias'"), HasSubstr("result of a computation")));
  EXPECT_THAT(text({weight, weight}),
              AllOf(HasSubstr("'layer.bias'"), HasSubstr("'layer.weight'"), HasSubstr("once")));
  EXPECT_THAT(text({weight, {}}), AllOf(HasSubstr("'layer.bias'"), HasSubstr("undefined")));
}

TEST(Optimizer, ChangesNoGroupWhenAGradientOfOneIsWrong) {
  const at::Tensor a = torch::ones({2}).set_requires_grad(true),
                   b = torch::ones({3, 2}).set_requires_grad(true);
  Optimizer optimizer({ParamGroup({a}, SGD{.lr = 1}), ParamGroup({b}, Adam{})});
  a.mutable_grad() = torch::ones({2});
  b.mutable_grad() = torch::ones({3, 2}).to_sparse(1);
  EXPECT_THAT(error_of([&] { optimizer.step(); }).what(), HasSubstr("Adam: parameter 0"));
  EXPECT_TRUE(a.equal(torch::ones({2})));
}

/// How many of the tensors have a gradient, counted whenever a gradient of one of them is computed.
std::size_t count_gradients(const std::vector<at::Tensor>& parameters) {
  return static_cast<std::size_t>(
      std::count_if(parameters.begin(), parameters.end(), [](const auto& p) { return p.grad().defined(); }));
}

TEST(InBackward, StepsEachParameterWithTheBitsOfAStepAfterwardsAndHoldsOneGradient) {
  const auto make = [] {
    torch::manual_seed(4);
    torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 5),
                              torch::nn::Linear(5, 1));
    net->to(torch::kDouble);
    return net;
  };
  auto after = make(), during = make();
  Optimizer plain(*after, Adam{.lr = 0.1}), stepped(*during, Adam{.lr = 0.1});
  const at::Tensor x = torch::linspace(-1, 1, 12, torch::kDouble).view({4, 3});
  std::size_t most = 0;
  const std::vector<at::Tensor> parameters = during->parameters();
  for (const at::Tensor& parameter : parameters) {
    parameter.register_hook([&](const at::Tensor&) { most = std::max(most, count_gradients(parameters)); });
  }
  {
    const BackwardSteps steps = stepped.step_in_backward();
    EXPECT_THROW(stepped.clip_grad_norm(1), Error) << "no gradient would be left";
    for (int step = 0; step < 5; ++step) {
      plain.zero_grad();
      after->forward(x).square().mean().backward();
      plain.step();
      during->forward(x).square().mean().backward();
      EXPECT_EQ(count_gradients(parameters), 0u);
    }
  }
  EXPECT_EQ(most, 0u);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(parameters[i].equal(after->parameters()[i])) << i;
  during->forward(x).square().mean().backward();  // BackwardSteps is destroyed
  EXPECT_EQ(count_gradients(parameters), parameters.size());
}

TEST(InBackward, IsRejectedWhereAnotherHookWaitsForTheGradient) {
  const at::Tensor weight = torch::ones({2}).set_requires_grad(true);
  Optimizer one({weight}, SGD{.lr = 1}), other({weight}, SGD{.lr = 1});
  const BackwardSteps steps = one.step_in_backward();
  EXPECT_THROW(static_cast<void>(other.step_in_backward()), Error);
  weight.sum().backward();
  EXPECT_TRUE(weight.equal(torch::zeros({2})));
}

TEST(TorchOptimizer, StepsLikeTheClassItWrapsAndLeavesGradAlone) {
  const at::Tensor ours = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  const at::Tensor skipped = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  const at::Tensor theirs = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  wire::Payload payload =
      wire::to_payload(OptimizerSpec(TorchSGD{torch::optim::SGDOptions(0.1).momentum(0.9)}));
  OptimizerTable table;
  table.add<TorchSGD>();
  const auto optimizer = table.build(wire::from_payload<OptimizerSpec>(payload), {ours, skipped});
  torch::optim::SGD oracle({theirs}, torch::optim::SGDOptions(0.1).momentum(0.9));
  const at::Tensor stale = torch::full({2}, 100.0, torch::kDouble);
  ours.mutable_grad() = stale;
  skipped.mutable_grad() = stale;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor gradient = torch::full({2}, 1.0 + step, torch::kDouble);
    optimizer->step(std::vector<at::Tensor>{gradient, at::Tensor()});
    theirs.mutable_grad() = gradient.clone();
    oracle.step();
  }
  EXPECT_TRUE(ours.equal(theirs));
  EXPECT_TRUE(skipped.equal(torch::ones({2}, torch::kDouble)));
  EXPECT_TRUE(ours.grad().is_same(stale));
  EXPECT_EQ(optimizer->lr(), 0.1);
}

TEST(LRScheduler, FactorsAreTheirClosedForms) {
  const LRLambda decay = StepLR{.step_size = 3, .gamma = 0.5};
  EXPECT_EQ(decay(2), 1);
  EXPECT_EQ(decay(3), 0.5);
  EXPECT_EQ(decay(7), 0.25);
  const LRLambda wave = CosineAnnealingLR{.t_max = 10, .eta_min_factor = 0.2};
  EXPECT_EQ(wave(0), 1);
  EXPECT_NEAR(wave(5), 0.6, 1e-12);
  EXPECT_NEAR(wave(10), 0.2, 1e-12);
  EXPECT_EQ(wave(11), wave(10));
  const LRLambda warm = WarmupLR{.total_iters = 4, .start_factor = 0.2, .then = decay};
  EXPECT_NEAR(warm(2), 0.6, 1e-12);
  EXPECT_EQ(warm(4), 1);
  EXPECT_EQ(warm(7), 0.5);
  const LRLambda cycle =
      OneCycleLR{.total_steps = 10, .pct_start = 0.5, .div_factor = 10, .final_div_factor = 10};
  EXPECT_NEAR(cycle(0), 0.1, 1e-12);
  EXPECT_NEAR(cycle(4), 1, 1e-12);
  EXPECT_NEAR(cycle(9), 0.01, 1e-12);
  EXPECT_EQ(cycle(100), cycle(9));
  EXPECT_THAT(error_of([] { static_cast<void>(LRLambda(StepLR{})); }).what(),
              HasSubstr("StepLR: step_size = 0"));
  EXPECT_THAT(error_of([] { static_cast<void>(LRLambda(CosineAnnealingLR{.t_max = 0})); }).what(),
              HasSubstr("CosineAnnealingLR: t_max = 0"));
  EXPECT_THAT(
      error_of([] { static_cast<void>(LRLambda(OneCycleLR{.total_steps = 10, .pct_start = 1})); }).what(),
      HasSubstr("pct_start = 1"));
}

TEST(LRScheduler, DrivesTheRatesOfGroupsAndResumes) {
  const at::Tensor a = torch::ones({2}).set_requires_grad(true), b = torch::ones({3}).set_requires_grad(true);
  Optimizer optimizer({ParamGroup({a}, SGD{.lr = 2}), ParamGroup({b}, Adam{.lr = 4})});
  LRScheduler schedule(optimizer, {StepLR{.step_size = 2, .gamma = 0.5},
                                   [](std::int64_t step) { return 1.0 / static_cast<double>(1 + step); }});
  EXPECT_THAT(optimizer.lrs(), ElementsAre(2, 4));
  schedule.step();
  schedule.step();
  schedule.step();
  EXPECT_THAT(optimizer.lrs(), ElementsAre(1, 1));
  std::stringstream file;
  torch::save(schedule.state_dict(), file);
  StateDict state;
  torch::load(state, file);
  // Created with rates that a schedule has changed: the state restores the base rates.
  LRScheduler resumed(optimizer,
                      {StepLR{.step_size = 2, .gamma = 0.5}, StepLR{.step_size = 1, .gamma = 0.5}});
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.steps(), 3);
  EXPECT_THAT(optimizer.lrs(), ElementsAre(1, 0.5));
  EXPECT_THAT(
      error_of([&] { LRScheduler(optimizer, std::vector<LRLambda>(3, WarmupLR{.total_iters = 1})); }).what(),
      HasSubstr("2 groups and 3 schedules"));
}

}  // namespace
}  // namespace torchspan::optim::optimizer_test
