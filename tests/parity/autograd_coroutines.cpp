// Handlers that are coroutines: a context or grad mode that one step sets is also set in the next step.
#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_coroutines {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
/// The state of a plain handler's thread: its context and its grad mode.
std::vector<bool> thread_state(std::int64_t) { return {autograd::has_current(), at::GradMode::is_enabled()}; }
Task<std::vector<at::Tensor>> train(Worker& worker, at::Tensor x, at::Tensor start);
Task<at::Tensor> cube(Worker& worker, at::Tensor x);
Task<std::vector<bool>> without_grad(Worker& worker, at::Tensor x);

constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<thread_state> kThreadState{"thread_state"};
constexpr Function<train> kTrain{"train"};
constexpr Function<cube> kCube{"cube"};
constexpr Function<without_grad> kWithoutGrad{"without_grad"};

/// The gradient of x * w * w * w, of which another worker computes two products.
Task<std::vector<at::Tensor>> train(Worker& worker, at::Tensor x, at::Tensor start) {
  const at::Tensor w = start.clone().set_requires_grad(true);
  std::vector<at::Tensor> results;
  {
    Context context(worker);
    const at::Tensor once = co_await worker.rpc_async(2, kMultiply, x, w);
    const at::Tensor twice = co_await worker.rpc_async(2, kMultiply, once, w);
    const auto id = autograd::has_current() ? autograd::current(worker).id() : 0;
    EXPECT_EQ(id, context.id());
    context.backward((twice * w).sum());
    results.push_back(context.gradient(w));
  }
  co_await worker.rpc_async(2, kThreadState, 0);
  EXPECT_FALSE(autograd::has_current());
  co_return results;
}

Task<at::Tensor> cube(Worker& worker, at::Tensor x) {
  const at::Tensor square = co_await worker.rpc_async(2, kMultiply, x, x);
  co_await worker.rpc_async(2, kThreadState, 0);
  co_return co_await worker.rpc_async(2, kMultiply, square, x);
}

Task<std::vector<bool>> without_grad(Worker& worker, at::Tensor x) {
  std::vector<bool> enabled;
  {
    const at::NoGradGuard no_grad;
    co_await worker.rpc_async(2, kMultiply, x, x);
    enabled.push_back(at::GradMode::is_enabled());
    co_await worker.rpc_async(2, kMultiply, x, x);
    enabled.push_back(at::GradMode::is_enabled());
  }
  co_await worker.rpc_async(2, kMultiply, x, x);
  enabled.push_back(at::GradMode::is_enabled());
  co_return enabled;
}

ClusterOptions world(std::uint64_t seed) {
  ClusterOptions options =
      autograd_world(3, FunctionTable().add(kMultiply, kThreadState, kTrain, kCube, kWithoutGrad));
  options.seed = seed;
  return options;
}

TEST(AutogradCoroutines, GoOnInTheContextThatTheyMade) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    on_first(world(seed), [](Worker& worker) {
      std::vector<at::Tensor> starts;
      std::vector<Future<std::vector<at::Tensor>>> trainings;
      const at::Tensor x = Kind(false).make(1, false);
      for (std::uint64_t i = 0; i < 6; ++i) {
        starts.push_back(Kind(false).make(10 + i, false));
        trainings.push_back(worker.rpc_async(1, kTrain, x, starts.back()));
      }
      for (std::size_t i = 0; i < starts.size(); ++i) {
        const Tensors alone =
            expected(Kind(false), {starts[i]}, [&](const Tensors& leaves) { return x * leaves[0].pow(3); });
        const Tensors gradients = trainings[i].wait();
        ASSERT_EQ(gradients.size(), 1U);
        expect_equal(gradients[0], alone[0]);
      }
    });
  }
}

TEST(AutogradCoroutines, KeepTheirGradModeAndLeaveThreadsTheirs) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    on_first(world(seed), [](Worker& worker) {
      std::vector<Future<std::vector<bool>>> runs, states;
      for (int i = 0; i < 6; ++i) {
        runs.push_back(worker.rpc_async(1, kWithoutGrad, at::ones({2})));
        states.push_back(worker.rpc_async(1, kThreadState, 0));
      }
      for (auto& run : runs) EXPECT_EQ(run.wait(), (std::vector<bool>{false, false, true}));
      for (auto& state : states) EXPECT_EQ(state.wait(), (std::vector<bool>{false, true}));
    });
  }
}

TEST(AutogradCoroutines, FollowTheContextOfTheirCallOverEveryWait) {
  on_first(world(1), [](Worker& worker) {
    const at::Tensor x = Kind(false).make(1);
    Context context(worker);
    expect_error(ErrorKind::kRemoteFailure, "contexts do not nest",
                 [&] { worker.rpc_sync(1, kTrain, x, x); });
    context.backward(worker.rpc_sync(1, kCube, x).sum());
    expect_equal(context.gradient(x), x.detach().pow(2) * 3);
  });
}

/// A thread that ends another thread's context keeps its own.
TEST(AutogradCoroutines, AContextThatEndsOnAnotherThreadLeavesThatThreadItsOwn) {
  on_first(world(1), [](Worker& worker) {
    auto foreign = std::make_unique<Context>(worker);
    Executor& executor = worker.runtime().executor;
    executor.spawn("other", [&] {
      Context own(worker);
      foreign.reset();
      ASSERT_TRUE(autograd::has_current());
      EXPECT_EQ(autograd::current(worker).id(), own.id());
      const at::Tensor x = Kind(false).make(1);
      own.backward(worker.rpc_sync(1, kMultiply, x, x).sum());
      expect_equal(own.gradient(x), x * 2);
    });
  });
}

}  // namespace
}  // namespace torchspan::autograd_coroutines
