// Which context is current on which thread: in continuations, coroutines, waiting callers, and with several
// workers in one process.
#include <c10/core/InferenceMode.h>

#include "tests/parity/autograd_world.h"

namespace torchspan::autograd_environments {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::microseconds;

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
void sleep_ms(Worker& worker, std::int64_t ms) { nap(worker, milliseconds(ms)); }
std::int64_t context_id(Worker& worker) {
  return autograd::has_current() ? static_cast<std::int64_t>(autograd::current(worker).id()) : 0;
}
at::Tensor train_by_then(Worker& worker, at::Tensor x, at::Tensor start);
Task<std::int64_t> keep_a_context(Worker& worker, std::int64_t ms);
Task<std::vector<std::int64_t>> add_continuations(Worker& worker, std::int64_t ms);

constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<sleep_ms> kSleepMs{"sleep_ms"};
constexpr Function<context_id> kContextId{"context_id"};
constexpr Function<train_by_then> kTrainByThen{"train_by_then"};
constexpr Function<keep_a_context> kKeepAContext{"keep_a_context"};
constexpr Function<add_continuations> kAddContinuations{"add_continuations"};

/// The gradient of x * w * w; a continuation of the first call makes the second one.
at::Tensor train_by_then(Worker& worker, at::Tensor x, at::Tensor start) {
  const at::Tensor w = start.clone().set_requires_grad(true);
  Context context(worker);
  const at::Tensor twice =
      worker.rpc_async(2, kMultiply, x, w)
          .then([&](Future<at::Tensor> once) { return worker.rpc_sync(2, kMultiply, once.wait(), w); })
          .wait();
  context.backward(twice.sum());
  return context.gradient(w);
}

Task<std::int64_t> keep_a_context(Worker& worker, std::int64_t ms) {
  Context context(worker);
  co_await worker.rpc_async(2, kSleepMs, ms);
  co_return static_cast<std::int64_t>(context.id());
}

/// The contexts in which three continuations of one future ran, and that of the coroutine; they were added
/// before, inside and after its own context.
Task<std::vector<std::int64_t>> add_continuations(Worker& worker, std::int64_t ms) {
  const Future<void> slow = worker.rpc_async(2, kSleepMs, ms);
  const auto ask = [worker](const Future<void>&) mutable { return context_id(worker); };
  const Future<std::int64_t> before = slow.then(ask);
  Future<std::int64_t> in;
  std::int64_t own = 0;
  {
    Context context(worker);
    own = static_cast<std::int64_t>(context.id());
    in = slow.then(ask);
    co_await worker.rpc_async(2, kSleepMs, ms + 5);  // both have run by then
  }
  const Future<std::int64_t> after = slow.then(ask);
  std::vector<std::int64_t> contexts;
  contexts.push_back(co_await before);
  contexts.push_back(co_await in - own);
  contexts.push_back(co_await after);
  co_return contexts;
}

ClusterOptions world(std::uint64_t seed = 1) {
  ClusterOptions options = autograd_world(
      3,
      FunctionTable().add(kMultiply, kSleepMs, kContextId, kTrainByThen, kKeepAContext, kAddContinuations));
  options.seed = seed;
  return options;
}

void on_seeds(const ClusterOptions& options, const std::function<void(Worker&)>& body) {
  for (std::uint64_t seed = 1; seed <= 10 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ClusterOptions seeded = options;
    seeded.seed = seed;
    SimCluster cluster(std::move(seeded));
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker);
    });
  }
}

/// The continuation ran in the scope of the served call, which has no context, and not in the handler's own
/// scope: the second call was sent detached, and the gradient was that of the last product alone.
TEST(AutogradEnvironments, AContinuationInAHandlerRunsInTheHandlersOwnContext) {
  on_seeds(world(), [](Worker& worker) {
    const at::Tensor x = Kind(false).make(1, false), start = Kind(false).make(2, false);
    const at::Tensor alone =
        expected(Kind(false), {start}, [&](const Tensors& leaves) { return x * leaves[0].pow(2); })[0];
    expect_equal(worker.rpc_sync(1, kTrainByThen, x, start), alone);
  });
}

/// The thread that the coroutine left kept its context, and later work on that thread used it.
TEST(AutogradEnvironments, ACoroutineTakesItsContextWithIt) {
  ClusterOptions options = world();
  options.threads = 1;
  on_seeds(options, [](Worker& worker) {
    const auto training = worker.rpc_async(0, kKeepAContext, 50);  // on this worker's only thread
    nap(worker, milliseconds(10));
    const auto seen =
        worker.rpc_async(1, kSleepMs, 1).then([&](const Future<void>&) { return context_id(worker); });
    EXPECT_EQ(seen.wait(), 0);
    EXPECT_NE(training.wait(), 0);
  });
}

/// They shared the coroutine's current state, whichever of them had changed it.
TEST(AutogradEnvironments, ContinuationsOfACoroutineRunInTheContextOfWhereTheyWereAdded) {
  on_seeds(world(), [](Worker& worker) {
    const auto contexts = worker.rpc_sync(1, kAddContinuations, 10);
    EXPECT_EQ(contexts, (std::vector<std::int64_t>{0, 0, 0}));
    Context context(worker);
    const auto id = static_cast<std::int64_t>(context.id());
    expect_error(ErrorKind::kRemoteFailure, "contexts do not nest",
                 [&] { worker.rpc_sync(1, kAddContinuations, 10); });
    EXPECT_EQ(worker.rpc_sync(1, kContextId), id);
  });
}

/// A thread that waits under inference mode reads replies for the training thread.
TEST(AutogradEnvironments, ReplyThatAnotherThreadReadsKeepsItsGradients) {
  ClusterOptions options = world();
  options.spin = microseconds(150);
  on_seeds(options, [](Worker& worker) {
    auto waiter = worker.runtime().executor.spawn("waiter", [&] {
      const c10::InferenceMode inference;
      for (int i = 0; i < 20; ++i) worker.rpc_sync(1, kSleepMs, 1);
    });
    const at::Tensor w = Kind(false).make(3);
    for (int i = 0; i < 20; ++i) {
      Context context(worker);
      const auto square = worker.rpc_async(2, kMultiply, w, w);
      nap(worker, microseconds(300));
      ASSERT_TRUE(square.done());
      context.backward(square.wait().sum());
      expect_equal(context.gradient(w), w.detach() * 2);
    }
  });
}

/// Runs `body` on a thread that uses two workers of this process.
void with_two_workers(const std::function<void(Worker& first, Worker& second)>& body) {
  SimCluster cluster(world());
  std::vector<std::optional<Worker>> workers(3);
  cluster.run([&](Worker& worker) {
    workers[worker.rank()] = worker;
    worker.barrier();
    if (worker.rank() == 0) {
      body(*workers[0], *workers[1]);
      workers = {};
    }
    worker.barrier();
  });
}

/// They were sent detached without a warning, because the reply looked for the context at a worker that had
/// none.
TEST(AutogradEnvironments, CallsThroughAWorkerWithoutAContextAreRefused) {
  with_two_workers([](Worker& first, Worker& second) {
    const at::Tensor w = Kind(false).make(1);
    Context context(first);
    EXPECT_FALSE(autograd::has_current(second));
    expect_error(ErrorKind::kInvalid, "goes through worker 'worker1'",
                 [&] { second.rpc_sync(2, kMultiply, w, w); });
    expect_error(ErrorKind::kInvalid, "an autograd context of worker 'worker0'",
                 [&] { autograd::current(second); });
    expect_equal(second.rpc_sync(2, kMultiply, w.detach(), w.detach()), (w * w).detach());
    EXPECT_EQ(second.rpc_sync(2, kContextId), 0) << "the other worker's context has no effect on it";
    context.backward(first.rpc_sync(2, kMultiply, w, w).sum());
    expect_equal(context.gradient(w), w.detach() * 2);
  });
}

TEST(AutogradEnvironments, EachWorkerOfAProcessHasAContextOfItsOwn) {
  with_two_workers([](Worker& first, Worker& second) {
    const at::Tensor v = Kind(false).make(1), w = Kind(false).make(2);
    Context one(first);
    {
      Context other(second);
      const at::Tensor square = first.rpc_sync(2, kMultiply, v, v),
                       cube = second.rpc_sync(2, kMultiply, w, w * w);
      other.backward(cube.sum());
      expect_equal(other.gradient(w), w.detach().pow(2) * 3);
      EXPECT_TRUE(one.gradients().empty());
      one.backward(square.sum());
      expect_equal(one.gradient(v), v.detach() * 2);
      EXPECT_EQ(second.rpc_sync(2, kContextId), static_cast<std::int64_t>(other.id()));
    }
    EXPECT_FALSE(autograd::has_current(second));
    EXPECT_EQ(first.rpc_sync(2, kContextId), static_cast<std::int64_t>(one.id()));
  });
}

}  // namespace
}  // namespace torchspan::autograd_environments
