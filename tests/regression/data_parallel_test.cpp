// Cases that LibTorch's data parallelism computes wrongly without an error, tried with release 1.13 over Gloo
// and two ranks, and what TorchSpan does instead. Each test covers one case.
#include <gtest/gtest.h>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/data_parallel.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/optimizer.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::data_parallel_defects_test {
namespace {

using data_parallel::DataParallelOptions;
using data_parallel::OnUnreducedBackward;
using testing::error_text;
using testing::on_ranks;
using testing::Rank;
namespace nn = torch::nn;

/// Two layers of one weight each: y = a·x, y = b·x. A rank's gradient of either weight is its input.
struct TwoImpl : nn::Module {
  TwoImpl() : TwoImpl(false) {}
  explicit TwoImpl(bool b_first) {
    if (b_first) b = register_parameter("b", at::ones({1}));
    a = register_parameter("a", at::ones({1}));
    if (!b_first) b = register_parameter("b", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& to_a, const at::Tensor& to_b) {
    at::Tensor y = at::zeros({1});
    if (to_a.defined()) y = y + a * to_a;
    if (to_b.defined()) y = y + b * to_b;
    return y;
  }
  at::Tensor a, b;
};
TORCH_MODULE(Two);

at::Tensor fed(double value) { return at::full({1}, value); }
double averaged(const at::Tensor& parameter) {
  return parameter.grad().defined() ? parameter.grad().item<double>() : -1;
}

// Rank 0 trains layer a and freezes b, rank 1 the other way round; the shapes are the same. LibTorch compares
// only shapes, so it averaged rank 0's gradient of a with rank 1's of b, on both.
// peer: ddp ddp_model_diff_shape_across_ranks
TEST(SilentWrongResult, RanksThatTrainDifferentLayersAreRefused) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    (self.rank == 0 ? two->b : two->a).set_requires_grad(false);
    const std::string text = error_text([&] { DistributedDataParallel model(two, self.group); });
    EXPECT_NE(text.find("'a' is"), std::string::npos) << text;
    EXPECT_NE(text.find("without gradient"), std::string::npos) << text;
  });
}

// The same layers, registered in another order on rank 1. LibTorch matches parameters by position: the
// averages were 1.5 and 1.5; correct are 1 and 2.
// peer: ddp ddp_model_diff_shape_across_ranks
TEST(SilentWrongResult, RanksThatRegisterLayersInAnotherOrderAreRefused) {
  on_ranks(2, [](const Rank& self) {
    Two two(self.rank == 1);
    const std::string text = error_text([&] { DistributedDataParallel model(two, self.group); });
    EXPECT_NE(text.find("'a' on rank 0 and 'b' on rank 1"), std::string::npos) << text;
  });
}

// The loss does not depend on b, which the program did not declare. In LibTorch's first step backward()
// returned and nothing was reduced (1 on rank 0, 2 on rank 1; correct is 1.5), the optimizers diverged, and
// the error appeared in the next forward, by index.
// peer: ddp ddp_unused_params_rebuild_buckets_exception
TEST(SilentWrongResult, AParameterWithoutAGradientFailsTheFirstBackwardByName) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    DistributedDataParallel model(two, self.group);
    const std::string text = error_text([&] { model(fed(1 + self.rank), at::Tensor()).sum().backward(); });
    EXPECT_NE(text.find("'b'"), std::string::npos) << text;
    two->zero_grad();
    model(fed(1 + self.rank), fed(1)).sum().backward();
    EXPECT_EQ(averaged(two->a), 1.5);
  });
}

// Gradients are accumulated over branch b under no_sync, then a reduced step takes branch a. LibTorch found b
// unused in the reduced step and skipped it: 1 on rank 0, 2 on rank 1, different from then on.
// peer: ddp grads_same_across_ranks_with_no_sync: same (1.13: silently wrong)
TEST(SilentWrongResult, GradientsOfAnotherBranchUnderNoSyncAreReduced) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    DistributedDataParallel model(two, self.group, {.find_unused_parameters = true});
    {
      const auto guard = model.no_sync();
      model(at::Tensor(), fed(1 + self.rank)).sum().backward();
    }
    model(fed(3 + self.rank), at::Tensor()).sum().backward();
    EXPECT_EQ(averaged(two->a), 3.5);
    EXPECT_EQ(averaged(two->b), 1.5);
  });
}

// Two forwards, then two backwards, as in adversarial training. LibTorch prepared the reduction in the last
// forward, reduced the first backward and left the second local: 2.5 on rank 0 and 3.5 on rank 1; correct is
// 3.
// peer: ddp (documented) two forwards
TEST(SilentWrongResult, BothOfTwoBackwardsAfterTwoForwardsAreReduced) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    DistributedDataParallel model(two, self.group);
    const at::Tensor one = model(fed(1 + self.rank), fed(1)).sum();
    const at::Tensor two_ = model(fed(1 + self.rank), fed(1)).sum();
    one.backward();
    two_.backward();
    EXPECT_EQ(averaged(two->a), 3);
    EXPECT_EQ(averaged(two->b), 2);
  });
}

// A program keeps the module that it wrapped and calls that. With LibTorch, each rank then trains separately.
// peer: ddp accumulate_gradients_module: better: warns, or throws on request
TEST(SilentWrongResult, ABackwardThatBypassesTheWrapperIsReportedOrRejected) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    {
      DistributedDataParallel model(two, self.group, {.unwrapped_backward = OnUnreducedBackward::kThrow});
      const std::string text = error_text([&] { two->forward(fed(1), fed(1)).sum().backward(); });
      EXPECT_NE(text.find("Call the wrapper"), std::string::npos) << text;
    }
    two->zero_grad();
    DistributedDataParallel model(two, self.group);
    two->forward(fed(1 + self.rank), fed(0)).sum().backward();  // warns; and the next reduced step has it
    model(fed(3), fed(0)).sum().backward();
    EXPECT_EQ(averaged(two->a), 4.5);
  });
}

// An optimizer that steps in backward, made before the wrapper. Its hook removed each gradient before the
// reducer's hook ran, which then averaged nothing: the replicas diverged.
TEST(SilentWrongResult, AnOptimizerThatStepsInBackwardIsRefusedWhicheverIsMadeFirst) {
  on_ranks(2, [](const Rank& self) {
    Two two;
    optim::Optimizer optimizer(two->parameters(), optim::SGD{.lr = 0.1});
    {
      std::optional<optim::BackwardSteps> steps;
      if (self.rank == 1) steps.emplace(optimizer.step_in_backward());
      const std::string text = error_text([&] { DistributedDataParallel model(two, self.group); });
      EXPECT_NE(text.find("rank 1 cannot begin: parameter 'a' is stepped in backward"), std::string::npos)
          << text;
      EXPECT_NE(text.find("call step() after backward"), std::string::npos) << text;
    }
    DistributedDataParallel model(two, self.group);
    const std::string text = error_text([&] { static_cast<void>(optimizer.step_in_backward()); });
    EXPECT_NE(text.find("DistributedDataParallel averages its gradient"), std::string::npos) << text;
    model(fed(1 + self.rank), fed(1)).sum().backward();
    EXPECT_EQ(averaged(two->a), 1.5);
  });
}

}  // namespace
}  // namespace torchspan::data_parallel_defects_test
