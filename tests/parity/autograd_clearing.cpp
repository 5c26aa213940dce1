// What a failed pass leaves behind: threads that are still in one of its nodes, gradients to be cleared, and
// full queues that delay the messages about it.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_clearing {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
std::int64_t size_of(const at::Tensor& tensor) { return tensor.numel(); }
std::int64_t contexts_of(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).contexts); }
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<size_of> kSizeOf{"size_of"};
constexpr Function<contexts_of> kContextsOf{"contexts_of"};

ClusterOptions world(int workers) {
  return autograd_world(workers, FunctionTable().add(kMultiply, kSizeOf, kContextsOf));
}

/// A leaf whose hook takes five seconds in its first call.
at::Tensor slow_once(Worker& worker) {
  at::Tensor a = parameter();
  a.register_hook([&worker, first = std::make_shared<bool>(true)](const at::Tensor& gradient) {
    if (std::exchange(*first, false)) nap(worker, seconds(5));
    return gradient;
  });
  return a;
}

/// The loss of a pass that timed out while a thread was in the hook of `a`, and whose gradients were cleared.
at::Tensor fail_and_clear(Worker& worker, const Context& context, const at::Tensor& a) {
  at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, a).sum();
  expect_error(ErrorKind::kTimedOut, "",
               [&] { context.backward(loss, {.retain_graph = true, .timeout = seconds(1)}); });
  context.clear_gradients();
  return loss;
}

TEST(AutogradClearing, NothingComesFromAThreadThatIsStillInAFailedPass) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = slow_once(worker);
    Context context(worker);
    fail_and_clear(worker, context, a);
    EXPECT_FALSE(context.gradient(a).defined());
    nap(worker, seconds(10));
    EXPECT_FALSE(context.gradient(a).defined());
  });
}

TEST(AutogradClearing, TheNextPassHasOnlyItsOwnGradients) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = slow_once(worker);
    Context context(worker);
    const at::Tensor loss = fail_and_clear(worker, context, a);
    context.backward(loss);
    nap(worker, seconds(10));
    expect_equal(context.gradient(a), a.detach() * 2);
  });
}

TEST(AutogradClearing, AWorkerThatLeftAnOpenWorldIsNotAsked) {
  ClusterOptions options = world(3);
  options.open = true;
  options.graceful = false;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(60));
    nap(worker, seconds(1));
    const at::Tensor a = parameter();
    Context context(worker);
    worker.rpc_sync(2, kMultiply, a, a);
    context.backward(worker.rpc_sync(1, kMultiply, a, a).sum());
    cluster.kill(2);
    nap(worker, seconds(10));
    EXPECT_FALSE(worker.endpoint()->is_present(2));
    context.clear_gradients();
    EXPECT_FALSE(context.gradient(a).defined());
  });
}

/// Fills the queue to worker 1 to the last byte.
void fill_queue(Worker& worker) {
  for (const std::int64_t size : {200 << 10, 10 << 10, 100}) {
    while (!worker.rpc_async(1, kSizeOf, at::zeros({size}, at::kByte)).done()) continue;
  }
  while (!worker.rpc_async(1, kContextsOf).done()) continue;
}

TEST(AutogradClearing, AReleaseThatFindsNoRoomIsResentUntilItArrives) {
  ClusterOptions options = world(3);
  options.max_unsent = 1 << 20;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    {
      Context context(worker);
      worker.rpc_sync("worker1", kMultiply, a, a);
      cluster.network().cut("worker0", "worker1");
      Thread filler = worker.runtime().executor.spawn("filler", [&] { fill_queue(worker); });
    }
    nap(worker, seconds(60));
    cluster.network().heal("worker0", "worker1");
    nap(worker, seconds(60));
    EXPECT_EQ(worker.rpc_sync(1, kContextsOf), 0);
  });
}

TEST(AutogradClearing, AReleaseThatIsAskedForAgainWaitsToo) {
  SimCluster cluster(world(2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    worker.rpc_sync("worker1", kMultiply, a, a);
    cluster.network().cut("worker0", "worker1");
    expect_error(ErrorKind::kTimedOut, "", [&] { context.release(milliseconds(500)); });
    expect_error(ErrorKind::kTimedOut, "", [&] { context.release(milliseconds(500)); });
    cluster.network().heal("worker0", "worker1");
    context.release();
    EXPECT_EQ(worker.rpc_sync(1, kContextsOf), 0);
  });
}

TEST(AutogradClearing, AFastPassAfterASmartOneWaitsForItsOwnSends) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor first = worker.rpc_sync("worker1", kMultiply, a, a).sum();
    context.backward(first);
    context.backward(worker.rpc_sync("worker1", kMultiply, a, a).sum(), {.mode = PassMode::kFast});
    expect_equal(context.gradient(a), a.detach() * 4);
    expect_error(ErrorKind::kRemoteFailure, "was used up by an earlier pass",
                 [&] { context.backward(first, {.mode = PassMode::kFast}); });
  });
}

}  // namespace
}  // namespace torchspan::autograd_clearing
