// The thread that reports a death also reports other deaths and answers heartbeats. No user code runs on it,
// however a pass or a context ends because of that death.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_death_threads {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor slowly(Worker& worker, const at::Tensor& x) {
  return sleeps_in_backward(x, worker.runtime(), seconds(20));
}
/// Freeing the memory that its graph holds takes a minute.
at::Tensor guarded(Worker& worker, const at::Tensor& x) {
  const auto numbers = std::make_shared<std::vector<double>>(2, 1.0);
  Executor& executor = worker.runtime().executor;
  const at::Tensor held = at::from_blob(
      numbers->data(), {2}, [numbers, &executor](void*) { executor.sleep(seconds(60)); }, at::kDouble);
  return x * held;
}
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<slowly> kSlowly{"slowly"};
constexpr Function<guarded> kGuarded{"guarded"};

/// Every worker is on a separate host, so that heartbeats detect deaths.
ClusterOptions world(int workers) {
  ClusterOptions options = autograd_world(workers, FunctionTable().add(kMultiply, kSlowly, kGuarded));
  options.graceful = false;
  options.adjust = [](int rank, WorkerPlan& plan) { plan.join.host_id = "host" + std::to_string(rank); };
  return options;
}

TEST(AutogradDeathThreads, ACallbackOfAPassEndedByADeathBlocksNothing) {
  SimCluster cluster(world(5));
  bool called = false;
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      nap(worker, seconds(50));
      EXPECT_TRUE(worker.backend()->is_present(1)) << "it had a slow callback only";
      return nap(worker, seconds(100));
    }
    if (worker.rank() != 1) return nap(worker, seconds(150));
    const at::Tensor a = parameter(), b = parameter();
    const auto node = torch::autograd::impl::grad_accumulator(b);
    node->add_post_hook(std::make_unique<AfterPass>(b, [&] {
      nap(worker, seconds(60));
      called = true;
    }));
    Context context(worker);
    worker.rpc_sync("worker3", kMultiply, a.detach(), a.detach());
    const at::Tensor loss = (worker.rpc_sync("worker2", kSlowly, a) * b).sum();
    Thread killer = worker.runtime().executor.spawn("killer", [&] {
      nap(worker, seconds(1));
      cluster.kill(3);
      nap(worker, seconds(10));
      cluster.kill(4);
      nap(worker, seconds(10));
      EXPECT_FALSE(worker.backend()->is_present(4)) << "ten seconds after its death";
    });
    expect_error(ErrorKind::kDisconnected, "worker3", [&] { context.backward(loss); });
    EXPECT_TRUE(called);
    killer.join();
    nap(worker, seconds(50));
  });
}

TEST(AutogradDeathThreads, AContextEndedByADeathIsReleasedOnAThreadThatMayWait) {
  SimCluster cluster(world(3));
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      nap(worker, seconds(50));
      EXPECT_TRUE(worker.backend()->is_present(1)) << "it had a slow destructor only";
      return nap(worker, seconds(100));
    }
    if (worker.rank() == 1) return nap(worker, seconds(150));
    Context context(worker);
    const at::Tensor far = worker.rpc_sync("worker1", kGuarded, parameter());
    nap(worker, seconds(1));
    cluster.kill(2);
    nap(worker, seconds(140));
  });
}

}  // namespace
}  // namespace torchspan::autograd_death_threads
