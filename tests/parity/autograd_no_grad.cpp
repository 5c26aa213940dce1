// Evaluation on other workers: CallOptions::no_grad is sent with the call, so that the callee builds no graph
// and no warning about detached gradients is logged.
#include <torchspan/core/task.h>
#include <torchspan/rpc/remote_module.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_no_grad {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct EvaluatedImpl : torch::nn::Module {
  EvaluatedImpl() {
    torch::manual_seed(7);
    linear = register_module("linear", torch::nn::Linear(3, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Evaluated);
constexpr ModuleClass<Evaluated> kLayer{"Layer"};

at::Tensor input() { return at::linspace(-1, 1, 6, at::kDouble).view({2, 3}); }
at::Tensor weight() { return at::full({3}, 2.0, at::kDouble).set_requires_grad(true); }

/// Returns the product of its parameter with `x`, whether gradients are enabled, and whether `x` requires
/// one.
std::vector<at::Tensor> product(const at::Tensor& x) {
  return {x * weight(), at::scalar_tensor(at::GradMode::is_enabled()), at::scalar_tensor(x.requires_grad())};
}
constexpr Function<product> kProduct{"product"};

/// Calls the next worker before and after it enables gradients for itself.
Task<std::vector<std::int64_t>> relay(Worker& worker, const at::Tensor& x) {
  std::vector<std::int64_t> seen;
  const auto next = [&] { return worker.rpc_async((worker.rank() + 1) % worker.world_size(), kProduct, x); };
  seen.push_back(at::GradMode::is_enabled() ? 1 : 0);
  seen.push_back((co_await next())[1].item<std::int64_t>());
  seen.push_back(at::GradMode::is_enabled() ? 1 : 0);
  const at::AutoGradMode on(true);
  worker.runtime().executor.sleep(milliseconds(1));
  seen.push_back((co_await next())[1].item<std::int64_t>());
  seen.push_back(at::GradMode::is_enabled() ? 1 : 0);
  co_return seen;
}
constexpr Function<relay> kRelay{"relay"};

/// The same in a continuation.
Future<bool> later(Worker& worker, const at::Tensor& x) {
  return worker.rpc_async(worker.rank(), kProduct, x).then([](const Future<std::vector<at::Tensor>>&) {
    return at::GradMode::is_enabled();
  });
}
constexpr Function<later> kLater{"later"};

ClusterOptions world() {
  ClusterOptions options = autograd_world(3, FunctionTable().add(kLayer, kProduct, kRelay, kLater));
  options.threads = 1;
  return options;
}
double warnings(const Worker& worker) {
  return static_cast<double>(worker.runtime().metrics.counter("rpc.detached_tensors").value());
}

TEST(NoGrad, EvaluatesARemoteModuleWithoutAGraphAndWithoutAWarning) {
  on_all(world(), [](Worker& worker) {
    if (worker.rank() == 0) {
      const RemoteModule layer(worker, 1, kLayer);
      const at::Tensor x = input().set_requires_grad(true);
      const at::Tensor y = layer.with({.no_grad = true}).forward(x);
      EXPECT_FALSE(y.requires_grad());
      EXPECT_TRUE(at::allclose(y, Evaluated()->forward(input()), 1e-12, 1e-12));
      const auto seen = worker.with({.no_grad = true}).rpc_sync(1, kProduct, x);
      EXPECT_FALSE(seen[0].requires_grad());
      EXPECT_FALSE(seen[1].item<bool>()) << "gradients are on there";
      EXPECT_FALSE(seen[2].item<bool>()) << "the argument needs a gradient there";
      EXPECT_TRUE(worker.rpc_sync(1, kProduct, input())[1].item<bool>()) << "the thread keeps the mode";
    }
    worker.barrier();
    EXPECT_EQ(warnings(worker), worker.rank() == 1 ? 1 : 0) << "of the one call that wants gradients";
  });
}

TEST(NoGrad, DoesNotWarnAboutCutGradients) {
  on_all(world(), [](Worker& worker) {
    const RemoteModule layer(worker, (worker.rank() + 1) % 3, kLayer);
    for (int i = 0; i < 3; ++i) layer.with({.no_grad = true}).forward(input() * weight());
    const auto kept = worker.with({.no_grad = true}).remote((worker.rank() + 1) % 3, kProduct, input());
    EXPECT_FALSE(kept.to_here()[0].requires_grad());
    worker.barrier();
    EXPECT_EQ(warnings(worker), 0);
    worker.barrier();
    layer.forward(input() * weight());  // as it is without
    worker.barrier();
    EXPECT_EQ(warnings(worker), 2) << "an argument and a result";
  });
}

TEST(NoGrad, TakesNoPartInAContext) {
  on_first(world(), [](Worker& worker) {
    const RemoteModule layer(worker, 1, kLayer);
    Context context(worker);
    const at::Tensor x = input().set_requires_grad(true);
    const at::Tensor evaluated = layer.with({.no_grad = true}).forward(x);
    EXPECT_FALSE(evaluated.requires_grad());
    EXPECT_TRUE(sends_of(context.graph(), 0).empty());
    const at::Tensor y = worker.rpc_sync(2, kProduct, x)[0];
    context.backward((y * evaluated).sum(), {.mode = autograd::PassMode::kFast});
    expect_equal(context.gradient(x), evaluated * 2);
    EXPECT_EQ(ranks_of(context.graph()), (std::vector<std::uint32_t>{0, 2}));
  });
}

TEST(NoGrad, FollowsACoroutineAndTheCallsItMakes) {
  on_first(world(), [](Worker& worker) {
    const Caller evaluate = worker.with({.no_grad = true});
    EXPECT_EQ(evaluate.rpc_sync(1, kRelay, input()), (std::vector<std::int64_t>{0, 0, 0, 1, 1}));
    EXPECT_EQ(worker.rpc_sync(1, kRelay, input()), (std::vector<std::int64_t>{1, 1, 1, 1, 1}));
    EXPECT_FALSE(evaluate.rpc_sync(1, kLater, input()));
    EXPECT_TRUE(worker.rpc_sync(1, kLater, input()));
  });
}

}  // namespace
}  // namespace torchspan::autograd_no_grad
