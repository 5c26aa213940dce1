// Effects of passes on others: callbacks, workers that take no part, and gradients that take long to arrive.
#include "autograd/messages/messages.h"
#include "tests/parity/autograd_slow.h"
#include "tests/parity/rpc_faults.h"

namespace torchspan::autograd_bystanders {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
constexpr Function<multiply> kMultiply{"multiply"};
at::Tensor slowly(Worker& worker, const at::Tensor& x, std::int64_t time) {
  return sleeps_in_backward(x, worker.runtime(), seconds(time));
}
constexpr Function<slowly> kSlowly{"slowly"};
void back_slowly(Worker& worker, std::int64_t time) {
  autograd::current(worker).backward(sleeps_in_backward(parameter(), worker.runtime(), seconds(time)).sum());
}
constexpr Function<back_slowly> kBackSlowly{"back_slowly"};
at::Tensor own_tensor() { return parameter() * 2; }
constexpr Function<own_tensor> kOwnTensor{"own_tensor"};
at::Tensor times_own_of_2(Worker& worker, const at::Tensor& x) { return worker.rpc_sync(2, kOwnTensor) * x; }
constexpr Function<times_own_of_2> kTimesOwnOf2{"times_own_of_2"};
/// A pass in which worker 2 waits for a gradient that never arrives.
void back_over_1(Worker& worker) {
  const at::Tensor a = parameter();
  worker.rpc_sync(2, kMultiply, a, a);
  autograd::current(worker).backward(worker.rpc_sync(1, kTimesOwnOf2, a).sum(), {.mode = PassMode::kFast});
}
constexpr Function<back_over_1> kBackOver1{"back_over_1"};
std::int64_t passes(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).passes); }
constexpr Function<passes> kPasses{"passes"};

ClusterOptions world(int workers) {
  return autograd_world(workers, FunctionTable()
                                     .add(kMultiply, kSlowly, kBackSlowly, kOwnTensor, kTimesOwnOf2)
                                     .add(kBackOver1, kPasses));
}

TEST(AutogradBystanders, ASlowGradientIsNoStall) {
  ClusterOptions options = world(2);
  options.network.reorder = true;  // all other messages overtake it
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kMultiply, a, a).sum();
    cluster.network().delay_if(
        [](const net::SimMessage& message) {
          return message.from.starts_with("sim:worker1") &&
                 request_type(message) == autograd::PropagateGradients::kType;
        },
        seconds(20));
    const TimePoint begin = now(worker);
    context.backward(loss, {.mode = PassMode::kFast, .stall = seconds(1)});
    EXPECT_GE(now(worker) - begin, seconds(20)) << "nothing was tested";
    expect_equal(context.gradient(a), a.detach() * 2);
  });
}

TEST(AutogradBystanders, BackwardFailsAfterTheCallbacksOfThePass) {
  ClusterOptions options = world(4);
  options.graceful = false;
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(60));
    const at::Tensor a = parameter(), b = parameter();
    bool called = false;
    const auto node = torch::autograd::impl::grad_accumulator(b);  // not kept alive by b
    node->add_post_hook(std::make_unique<AfterPass>(b, [&] {
      nap(worker, seconds(2));
      called = true;
    }));
    Context context(worker);
    worker.rpc_sync("worker3", kMultiply, a.detach(), a.detach());
    const at::Tensor loss = (worker.rpc_sync("worker2", kSlowly, a, 10) * b).sum();
    const Thread killer = worker.runtime().executor.spawn("killer", [&] {
      nap(worker, seconds(1));
      cluster.kill(3);
    });
    const TimePoint begin = now(worker);
    expect_error(ErrorKind::kDisconnected, "worker3", [&] { context.backward(loss); });
    EXPECT_TRUE(called);
    EXPECT_LT(now(worker) - begin, seconds(5)) << "the slow node is not waited for";
    nap(worker, seconds(20));
  });
}

/// The caller does not take part in the pass.
TEST(AutogradBystanders, NothingIsClearedWhileAPassRunsElsewhere) {
  on_first(world(2), [](Worker& worker) {
    Context context(worker);
    const auto pass = worker.rpc_async("worker1", kBackSlowly, 5);
    nap(worker, seconds(1));
    EXPECT_EQ(counts_of(worker).passes, 0u);
    expect_error(ErrorKind::kInvalid, "still runs on worker 'worker1'", [&] { context.clear_gradients(); });
    pass.wait();
    context.clear_gradients();
  });
}

TEST(AutogradBystanders, GradientsAreReplacedAfterAPassOnly) {
  on_first(world(2), [](Worker& worker) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    x.register_hook([&](const at::Tensor& gradient) {
      nap(worker, seconds(2));
      return gradient;
    });
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker1", kMultiply, x, x).sum();
    const auto pass = worker.delay(seconds(1)).then([&](const Future<void>&) {
      expect_error(ErrorKind::kInvalid, "a backward pass runs",
                   [&] { context.replace_gradient(x, at::zeros({2})); });
    });
    context.backward(loss);
    pass.wait();
    EXPECT_FALSE(at::equal(context.gradient(x), at::full({2}, 7)));
    context.replace_gradient(x, at::full({2}, 7));
    EXPECT_TRUE(at::equal(context.gradient(x), at::full({2}, 7)));
    EXPECT_FALSE(x.grad().defined());
  });
}

/// The root is dead, and a gradient of its pass arrives from a live worker.
TEST(AutogradBystanders, NoPassBeginsWhoseRootIsDead) {
  ClusterOptions options = world(4);
  options.graceful = false;
  options.network.reorder = true;
  bool late = false;  // the network uses it until it ends
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return nap(worker, seconds(60));
    cluster.network().delay_if(
        [&](const net::SimMessage& message) {
          const bool is_it = message.from.starts_with("sim:worker1") &&
                             message.to.starts_with("sim:worker2") &&
                             request_type(message) == autograd::PropagateGradients::kType;
          late = late || is_it;
          return is_it;
        },
        seconds(5));
    cluster.network().drop_if(requests_of(autograd::AbortPass::kType));
    Context context(worker);
    const auto pass = worker.rpc_async("worker3", kBackOver1);
    nap(worker, seconds(1));
    EXPECT_TRUE(late) << "nothing was tested";
    cluster.kill(3);
    expect_error(ErrorKind::kDisconnected, "worker3", [&] { pass.wait(); });
    nap(worker, seconds(10));
    EXPECT_EQ(worker.rpc_sync("worker2", kPasses), 0);
  });
}

}  // namespace
}  // namespace torchspan::autograd_bystanders
