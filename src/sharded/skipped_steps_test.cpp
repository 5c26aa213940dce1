// One rank throws between forward and backward, and all ranks skip that step: with divided state, the others train as one
// process does that never saw the batch. And losses that depend on derivatives of the outputs.
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::skipped_steps_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Sharded<Dense>(5 * i)));
    head = register_parameter("head", values({kWidth, 2}, 77));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return at::matmul(x, head);
  }
  std::vector<Sharded<Dense>> blocks;
  at::Tensor head;
};
TORCH_MODULE(Net);

constexpr int kRanks = 3, kSteps = 6, kSkipped = 2;
constexpr double kRate = 0.05;

at::Tensor input(int rank, int step, int part = 0) {
  return values({3, kWidth}, rank + 0.4 * step + 9 * part);
}

/// The parameters after training in one process, without the skipped step.
std::vector<at::Tensor> train_alone() {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSkipped) continue;
    optimizer.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int part = 0; part < 2; ++part) (net(input(rank, step, part)).pow(2).sum() / kRanks).backward();
    }
    optimizer.step();
  }
  return net->parameters();
}

/// How the ranks decide to skip a step: the program reduces a flag or calls agree(), after backward or before it.
struct Decision {
  bool by_program = false, before_backward = false, keeps_outputs = false;
};

/// One rank's training with either class. `step` takes whether the ranks train with the step's gradients.
template <class Model>
void train(const Rank& self, Model& model, Decision decision, const std::function<void(bool)>& step) {
  for (int i = 0; i < kSteps; ++i) {
    at::Tensor kept;
    std::string text;
    try {
      {
        const auto local = model.no_sync();
        model(input(self.rank, i, 0)).pow(2).sum().backward();
      }
      const at::Tensor output = model(input(self.rank, i, 1));
      if (decision.keeps_outputs) kept = output;
      if (i == kSkipped && self.rank == 1) throw std::runtime_error("not a number");
      kept = output.pow(2).sum();
      if (!decision.before_backward) kept.backward();
    } catch (const std::exception& error) {
      text = error.what();
    }
    bool ok = text.empty();
    if (decision.by_program) {
      const at::Tensor flag = at::full({1}, ok ? 1 : 0, at::kInt);
      ok = self.group.all_reduce(flag, collective::kMin).wait().item<int>() != 0;
    } else {
      ok = model.agree(ok);
    }
    EXPECT_EQ(ok, i != kSkipped) << "rank " << self.rank << ": " << text;
    if (i == kSkipped && self.rank != 1 && !decision.before_backward) {
      EXPECT_THAT(text, HasSubstr("rank 1"));
    }
    if (ok && decision.before_backward) kept.backward();
    step(ok);
  }
}

const std::vector<Decision> kDecisions{{.by_program = true},
                                       {},
                                       {.keeps_outputs = true},
                                       {.before_backward = true},
                                       {.before_backward = true, .keeps_outputs = true}};

TEST(SkippedSteps, OfAFullyShardedModelLeaveItsGroupIntact) {
  std::vector<Decision> decisions = kDecisions;
  decisions.push_back({.by_program = true, .before_backward = true});
  for (const Decision& decision : decisions) {
    for (const bool keeps_units : {false, true}) {
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        SCOPED_TRACE(seed);
        on_ranks(
            kRanks,
            [&](const Rank& self) {
              Net net;
              FullyShardedDataParallel<Net> model(net, self.group, {.reshard_after_forward = !keeps_units});
              torch::optim::SGD optimizer(net->parameters(), kRate);
              train(self, model, decision, [&](bool ok) {
                if (ok) optimizer.step();
                model.zero_grad();
              });
              const std::vector<at::Tensor> expected = train_alone();
              model.with_full_parameters([&] {
                const std::vector<at::Tensor> trained = net->parameters();
                for (std::size_t p = 0; p < expected.size(); ++p)
                  EXPECT_TRUE(at::allclose(trained[p], expected[p], 1e-10, 1e-12)) << p;
              });
            },
            seed);
      }
    }
  }
}

TEST(SkippedSteps, OfAFullyShardedModelMayBeThoseOfAllRanks) {
  on_ranks(kRanks, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    for (int i = 0; i < 4; ++i) {
      try {
        const at::Tensor loss = model(input(self.rank, i)).pow(2).sum();
        if (i == 1 || (i == 2 && self.rank > 0)) throw std::runtime_error("not a number");
        loss.backward();
        EXPECT_NE(i, 2) << "rank 0 fails with the others";
      } catch (const std::exception& error) {
        EXPECT_TRUE(i == 1 || i == 2) << error.what();
      }
    }
  });
}

TEST(SkippedSteps, OfZeroLeaveItsOptimizerIntact) {
  for (const Decision& decision : kDecisions) {
    for (const bool divide : {false, true}) {
      for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        SCOPED_TRACE(seed);
        on_ranks(
            kRanks,
            [&](const Rank& self) {
              Net net;
              DistributedDataParallel<Net> model(net, self.group);
              ZeroRedundancyOptimizer optimizer(model, optim::SGD{.lr = kRate}, {.divide_gradients = divide});
              train(self, model, decision, [&](bool ok) { ok ? optimizer.step() : optimizer.zero_grad(); });
              const std::vector<at::Tensor> expected = train_alone(), trained = net->parameters();
              for (std::size_t p = 0; p < expected.size(); ++p)
                EXPECT_TRUE(at::allclose(trained[p], expected[p], 1e-10, 1e-12)) << p;
            },
            seed);
      }
    }
  }
}

/// A loss that depends on the parameters through the derivatives of the outputs only.
at::Tensor forces_of(const at::Tensor& y, const at::Tensor& x) {
  return torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0].pow(2).sum();
}

TEST(Derivatives, OfTheOutputsTrainWithZero) {
  on_ranks(2, [&](const Rank& self) {
    Net net, alone;
    DistributedDataParallel<Net> model(net, self.group,
                                       {.unwrapped_backward = data_parallel::OnUnreducedBackward::kThrow});
    ZeroRedundancyOptimizer optimizer(model, optim::SGD{.lr = kRate});
    torch::optim::SGD expected(alone->parameters(), kRate);
    for (int step = 0; step < 4; ++step) {
      const auto x_of = [&](int rank) { return input(rank, step).detach().requires_grad_(); };
      expected.zero_grad();
      for (int rank = 0; rank < 2; ++rank) {
        const at::Tensor x = x_of(rank);
        (forces_of(alone(x), x) / 2).backward();
      }
      expected.step();
      const at::Tensor x = x_of(self.rank);
      forces_of(model(x), x).backward();
      optimizer.step();
    }
    const std::vector<at::Tensor> wanted = alone->parameters(), trained = net->parameters();
    for (std::size_t p = 0; p < wanted.size(); ++p)
      EXPECT_TRUE(at::allclose(trained[p], wanted[p], 1e-10, 1e-12)) << p;
  });
}

TEST(Derivatives, OfTheOutputsAreRefusedByFullyShardedModelsOnAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    Net net;
    FullyShardedDataParallel<Net> model(net, self.group);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = input(self.rank, step).requires_grad_();
      if (step == 1) {
        const Error error = error_of([&] { forces_of(model(x), x); });
        EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
        EXPECT_THAT(error.what(), HasSubstr("double backward (create_graph)"));
        continue;
      }
      if (step == 2 && self.rank == 0) {  // the other rank needs no derivatives, but its step fails, too
        EXPECT_EQ(error_of([&] { forces_of(model(x), x); }).kind(), ErrorKind::kUnsupported);
        continue;
      }
      const at::Tensor y = model(x);
      if (step == 2) {
        EXPECT_THAT(error_of([&] { y.sum().backward(); }).what(), HasSubstr("rank 0 runs no backward pass"));
      } else {
        y.sum().backward();
      }
    }
    model(input(self.rank, 3)).sum().backward();
  });
}

}  // namespace
}  // namespace torchspan::sharded::skipped_steps_test
