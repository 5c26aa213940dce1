// What forwards of units take and return.
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <tuple>

#include <ATen/core/ivalue.h>

#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::outputs_test {
namespace {

using testing::Dense;
using testing::kWidth;
using testing::values;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

}  // namespace

struct Named {
  std::string name;
  std::map<std::string, at::Tensor> tensors;
  int count = 0;
};

}  // namespace torchspan::sharded::outputs_test

template <>
struct torchspan::data_parallel::OutputTensors<torchspan::sharded::outputs_test::Named> {
  static void visit(torchspan::sharded::outputs_test::Named& value, auto& visitor) {
    visit_tensors(value.tensors, visitor);
  }
};

namespace torchspan::sharded::outputs_test {
namespace {

/// Takes and returns tensors beside other values; a caller may leave out one of the outputs.
struct SplitImpl : torch::nn::Module {
  SplitImpl() {
    first = register_parameter("first", values({kWidth, kWidth}, 1));
    second = register_parameter("second", values({kWidth, kWidth}, 2));
  }
  std::tuple<at::Tensor, int, at::Tensor> forward(const Named& input) {
    const at::Tensor& x = input.tensors.at("x");
    return {at::matmul(x, first), input.count + 1, at::matmul(x, second)};
  }
  at::Tensor first, second;
};
TORCH_MODULE(Split);

struct CollectImpl : torch::nn::Module {
  explicit CollectImpl(double seed) { dense = register_module("dense", Dense(seed)); }
  Named forward(const std::string& name, const at::Tensor& x) {
    return {name, {{"x", dense->forward(x)}, {"unused", x * 2}}, 3};
  }
  Dense dense{nullptr};
};
TORCH_MODULE(Collect);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    collect = register_module("collect", Sharded<Collect>(1));
    split = register_module("split", Sharded<Split>());
    dense = register_module("dense", Sharded<Dense>(5));
  }
  at::Tensor forward(const at::Tensor& x, bool with_second) {
    const Named named = collect->forward("a name", x);
    EXPECT_EQ(named.name, "a name");
    const auto [y, count, z] = split->forward(named);
    EXPECT_EQ(count, 4);
    const at::Tensor out = dense->forward(y);
    return with_second ? out + z : out;
  }
  Sharded<Collect> collect{nullptr};
  Sharded<Split> split{nullptr};
  Sharded<Dense> dense{nullptr};
};
TORCH_MODULE(Net);

at::Tensor input(int rank, int step) { return values({3, kWidth}, rank + 0.4 * step); }
bool uses_second(int rank, int step) { return (rank + step) % 3 == 0 && step != 2; }

// peer: fsdp test_unused_forward_output: same: on some ranks, on none
// peer: fsdp test_nontensor_activations: same: structs, tuples, numbers, text
// peer: fsdp test_dataclass_input: same
TEST(Outputs, ValuesAreReturnedAndUnusedTensorsGetNoGradient) {
  constexpr int kSize = 3;
  Net wanted;
  optim::Optimizer reference(*wanted, optim::SGD({.lr = 0.05}));
  for (int step = 0; step < 4; ++step) {
    for (int rank = 0; rank < kSize; ++rank)
      (wanted->forward(input(rank, step), uses_second(rank, step)).pow(2).sum() / kSize).backward();
    reference.step();
    reference.zero_grad();
  }
  on_ranks(kSize, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    optim::Optimizer sgd(*net, optim::SGD({.lr = 0.05}));
    for (int step = 0; step < 4; ++step) {
      model(input(self.rank, step), uses_second(self.rank, step)).pow(2).sum().backward();
      EXPECT_EQ(net->split->second.grad().defined(), step != 2);
      sgd.step();
      sgd.zero_grad();
    }
    model.with_full_parameters([&] {
      const auto expected = wanted->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
    });
  });
}

// peer: fsdp test_non_root_forward_backward: same
TEST(Outputs, AUnitTrainsOutsideOfTheForwardOfTheModule) {
  constexpr int kSize = 3;
  Net wanted;
  for (int rank = 0; rank < kSize; ++rank)
    (wanted->dense->forward(input(rank, 0)).pow(2).sum() / kSize).backward();
  on_ranks(kSize, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    for (int step = 0; step < 2; ++step) {
      net->dense->forward(input(self.rank, 0)).pow(2).sum().backward();
      optim::Optimizer sgd(*net, optim::SGD({.lr = 1}));
      EXPECT_FALSE(net->split->first.grad().defined());
      sgd.step();
      model.with_full_parameters([&] {
        const at::Tensor& expected = wanted->dense->weight;
        if (step == 0) {
          EXPECT_TRUE(at::allclose(net->dense->weight, expected - expected.grad(), 1e-10, 1e-12));
        }
      });
      sgd.zero_grad();
      model(input(self.rank, 1), true);
    }
  });
}

/// Returns views of its parameters, as a table of positions does, and one of them itself.
struct PositionsImpl : torch::nn::Module {
  PositionsImpl() {
    table = register_parameter("table", values({7, kWidth}, 3));
    gain = register_parameter("gain", values({kWidth}, 4));
  }
  std::tuple<at::Tensor, at::Tensor> forward(std::int64_t count) { return {table.narrow(0, 1, count), gain}; }
  at::Tensor table, gain;
};
TORCH_MODULE(Positions);

struct PositionedImpl : torch::nn::Module {
  PositionedImpl() {
    positions = register_module("positions", Sharded<Positions>());
    dense = register_module("dense", Sharded<Dense>(5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto [rows, gain] = positions->forward(x.size(0));
    return dense->forward(x + rows) * gain;
  }
  Sharded<Positions> positions{nullptr};
  Sharded<Dense> dense{nullptr};
};
TORCH_MODULE(Positioned);

TEST(Outputs, AUnitMayReturnViewsOfItsParameters) {
  constexpr int kSize = 2;
  Positioned wanted;
  optim::Optimizer reference(*wanted, optim::SGD({.lr = 0.05}));
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < kSize; ++rank)
      (wanted->forward(input(rank, step)).pow(2).sum() / kSize).backward();
    reference.step();
    reference.zero_grad();
  }
  const at::Tensor output = wanted->forward(input(0, 0)).detach();
  for (const bool reshards : {true, false}) {
    on_ranks(kSize, [&](const Rank& self) {
      Positioned net;
      FullyShardedDataParallel<Positioned> model(net, self.group, {.reshard_after_forward = reshards});
      optim::Optimizer sgd(*net, optim::SGD({.lr = 0.05}));
      for (int step = 0; step < 2; ++step) {
        model(input(self.rank, step)).pow(2).sum().backward();
        sgd.step();
        sgd.zero_grad();
      }
      at::Tensor evaluated;
      {
        const at::NoGradGuard no_grad;
        evaluated = model(input(0, 0));
      }
      EXPECT_TRUE(at::allclose(evaluated, output, 1e-10, 1e-12));
      model.with_full_parameters([&] {
        const auto expected = wanted->named_parameters();
        for (const auto& item : net->named_parameters())
          EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 1e-10, 1e-12)) << item.key();
      });
    });
  }
}

}  // namespace
}  // namespace torchspan::sharded::outputs_test
