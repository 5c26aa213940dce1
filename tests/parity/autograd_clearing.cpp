// What a failed pass leaves behind: threads that are still in one of its nodes, gradients to be cleared, and
// full queues that delay the messages about it.
#include "autograd/messages/messages.h"
#include "tests/parity/autograd_slow.h"
#include "tests/parity/rpc_faults.h"

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

at::Tensor own_tensor() { return parameter() * 2; }
at::Tensor times_own_of_2(Worker& worker, const at::Tensor& x);
at::Tensor own_gradient(Worker& worker) { return autograd::current(worker).gradients().at(0).gradient; }
constexpr Function<own_tensor> kOwnTensor{"own_tensor"};
constexpr Function<times_own_of_2> kTimesOwnOf2{"times_own_of_2"};
constexpr Function<own_gradient> kOwnGradient{"own_gradient"};
at::Tensor times_own_of_2(Worker& worker, const at::Tensor& x) { return worker.rpc_sync(2, kOwnTensor) * x; }

/// Keeps a tensor that it got, and uses it in the results of several calls.
struct Keeper {
  at::Tensor begin() { return parameter() + 1; }
  void keep(const at::Tensor& x) { kept = x + 1; }
  std::vector<at::Tensor> own_and_kept() { return {parameter() + 1, kept + 1}; }
  at::Tensor from_kept() { return kept + 1; }
  at::Tensor kept;
};
constexpr Class<Keeper> kKeeper{"Keeper"};
constexpr Function<&Keeper::begin> kBegin{"Keeper.begin"};
constexpr Function<&Keeper::keep> kKeep{"Keeper.keep"};
constexpr Function<&Keeper::own_and_kept> kOwnAndKept{"Keeper.own_and_kept"};
constexpr Function<&Keeper::from_kept> kFromKept{"Keeper.from_kept"};

ClusterOptions world(int workers) {
  return autograd_world(workers, FunctionTable()
                                     .add(kMultiply, kSizeOf, kContextsOf, kOwnTensor, kTimesOwnOf2)
                                     .add(kOwnGradient, kKeeper, kBegin, kKeep, kOwnAndKept, kFromKept));
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

TEST(AutogradClearing, AnEndedContextKeepsNoGraphThatWasSent) {
  on_first(world(2), [](Worker& worker) {
    std::optional<autograd::ContextView> view;  // keeps the state of the context
    std::weak_ptr<torch::autograd::Node> sent;
    {
      Context context(worker);
      view.emplace(context);
      const at::Tensor doubled = parameter() * 2;
      sent = doubled.grad_fn();
      worker.rpc_sync("worker1", kMultiply, doubled, doubled);
    }
    EXPECT_TRUE(sent.expired());
    EXPECT_TRUE(view->gradients().empty());
  });
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

/// The notice of the failure and a gradient of the failed pass reach worker 2 late, the gradient first.
TEST(AutogradClearing, WaitsUntilNoWorkerCanBeginTheFailedPass) {
  ClusterOptions options = world(3);
  options.network.reorder = true;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kTimesOwnOf2, a).sum();
    const auto to_2 = [](wire::MessageType type) {
      return [type](const net::SimMessage& message) {
        return message.to.starts_with("sim:worker2") && request_type(message) == type;
      };
    };
    cluster.network().delay_if(to_2(autograd::PropagateGradients::kType), seconds(5));
    cluster.network().drop_if(to_2(autograd::AbortPass::kType));
    const auto backward = [&] {
      context.backward(loss, {.retain_graph = true, .mode = PassMode::kFast, .timeout = seconds(1)});
    };
    expect_error(ErrorKind::kTimedOut, "", backward);
    cluster.network().delay_if({}, {});
    const Thread healer = worker.runtime().executor.spawn("healer", [&] {
      nap(worker, seconds(5));
      cluster.network().drop_if({});
    });
    context.clear_gradients();
    nap(worker, seconds(10));
    backward();
    expect_equal(worker.rpc_sync("worker2", kOwnGradient), a.detach() * 2);
  });
}

TEST(AutogradClearing, ThatCannotBeConfirmedFailsAndMayBeRepeated) {
  SimCluster cluster(world(2));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = slow_once(worker);
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, a).sum();
    cluster.network().drop_if(requests_of(autograd::AbortPass::kType));
    expect_error(ErrorKind::kTimedOut, "", [&] { context.backward(loss, {.timeout = seconds(1)}); });
    expect_error(ErrorKind::kTimedOut, "has not confirmed", [&] { context.clear_gradients(seconds(1)); });
    cluster.network().drop_if({});
    context.clear_gradients();
    nap(worker, seconds(10));
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
    EXPECT_FALSE(worker.backend()->is_present(2));
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

/// One edge to the tensor that worker 1 keeps comes from a result that an earlier pass used up, so its node waits
/// until the marks are complete. The last mark goes to the tensor from which it was computed.
TEST(AutogradClearing, ASmartPassContinuesWhenItsLastMarkArrives) {
  on_first(world(2), [](Worker& worker) {
    const auto keeper = worker.remote("worker1", kKeeper);
    Context context(worker);
    keeper.rpc_sync(kKeep, keeper.rpc_sync(kBegin) + 1);
    context.backward(keeper.rpc_sync(kOwnAndKept)[0].sum());
    const at::Tensor loss = keeper.rpc_sync(kFromKept).sum();
    context.backward(loss, {.retain_graph = true, .mode = PassMode::kFast});
    const TimePoint begin = now(worker);
    context.backward(loss, {.timeout = seconds(30)});
    EXPECT_LT(now(worker) - begin, seconds(1));
  });
}

}  // namespace
}  // namespace torchspan::autograd_clearing
