// Workers that join and leave during a pass: one that died while its message waited for a thread, and one
// that replaced another.
#include "tests/parity/autograd_slow.h"

namespace torchspan::autograd_departures {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
constexpr Function<multiply> kMultiply{"multiply"};
at::Tensor own_tensor() { return parameter() * 2; }
constexpr Function<own_tensor> kOwnTensor{"own_tensor"};
void work(Worker& worker) { worker.runtime().executor.sleep(seconds(1)); }
constexpr Function<work> kWork{"work"};
void call_3(Worker& worker, const at::Tensor& x) {
  static_cast<void>(worker.rpc_async("worker3", kMultiply, x, x));
}
constexpr Function<call_3> kCall3{"call_3"};
at::Tensor twice_to_3(Worker& worker, const at::Tensor& x) {
  const at::Tensor slow =
      sleeps_in_backward(worker.rpc_sync("worker3", kOwnTensor), worker.runtime(), milliseconds(500));
  return slow + worker.rpc_sync("worker3", kOwnTensor) + x;
}
constexpr Function<twice_to_3> kTwiceTo3{"twice_to_3"};
void pass_via_3(Worker& worker) {
  autograd::current(worker).backward(worker.rpc_sync("worker3", kOwnTensor).sum());
}
constexpr Function<pass_via_3> kPassVia3{"pass_via_3"};
std::int64_t contexts(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).contexts); }
constexpr Function<contexts> kContexts{"contexts"};
std::int64_t passes(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).passes); }
constexpr Function<passes> kPasses{"passes"};

/// Worker 3 has one thread; worker 0 only serves the store.
ClusterOptions world() {
  ClusterOptions options = autograd_world(5, FunctionTable()
                                                 .add(kMultiply, kOwnTensor, kWork, kCall3, kTwiceTo3)
                                                 .add(kPassVia3, kContexts, kPasses));
  options.threads = 1;
  options.graceful = false;
  return options;
}

/// Runs `body` on worker 1.
void on_second(const std::function<void(Worker&, SimCluster&)>& body) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 1) return nap(worker, seconds(60));
    body(worker, cluster);
  });
}

/// Occupies the only thread of worker 3 for a second, with a call outside of any context.
Thread keep_3_busy(Worker& worker) {
  Thread caller = worker.runtime().executor.spawn("caller", [&] { worker.rpc_sync("worker3", kWork); });
  nap(worker, milliseconds(10));
  return caller;
}

TEST(AutogradDepartures, AContextNamedByADeadWorkersCallIsReleased) {
  on_second([](Worker& worker, SimCluster& cluster) {
    {
      Context context(worker);
      Thread busy = keep_3_busy(worker);
      worker.rpc_sync("worker2", kCall3, parameter());
      nap(worker, milliseconds(10));
      cluster.kill(2);
      busy.join();
      nap(worker, seconds(1));
    }
    nap(worker, seconds(1));
    EXPECT_EQ(worker.rpc_sync("worker3", kContexts), 0);
  });
}

TEST(AutogradDepartures, APassNamedByADeadWorkersGradientsEnds) {
  on_second([](Worker& worker, SimCluster& cluster) {
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker2", kTwiceTo3, parameter()).sum();
    Thread busy = keep_3_busy(worker);
    Thread killer = worker.runtime().executor.spawn("killer", [&] {
      nap(worker, milliseconds(100));
      cluster.kill(2);
    });
    const Error error = error_of([&] { context.backward(loss); });
    EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    busy.join();
    killer.join();
    nap(worker, seconds(2));
    EXPECT_EQ(worker.rpc_sync("worker3", kPasses), 0);
    worker.rpc_sync("worker4", kPassVia3);
  });
}

TEST(AutogradDepartures, AReplacementWorkerCreatesContexts) {
  ClusterOptions options = world();
  options.workers = 1;
  options.open = true;
  options.graceful = true;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    std::vector<Thread> lives;
    for (const int incarnation : {0, 1}) {
      bool done = false;
      lives.push_back(cluster.start(1, incarnation, [&, incarnation](rpc::WorkerService& service) {
        Worker me = service.worker();
        for (int i = 0; i < 3; ++i) {
          const at::Tensor a = parameter();
          Context context(me);
          context.backward(me.rpc_sync(0, kMultiply, a, a).sum());
          expect_equal(context.gradient(a), a.detach() * 2);
          context.release(seconds(1));
        }
        done = true;
        nap(me, seconds(incarnation == 1 ? 2 : 20));
        if (incarnation == 1) service.shutdown(cluster.executor().deadline_in(seconds(60)));
      }));
      while (!done) nap(worker, milliseconds(10));
      if (incarnation == 0) cluster.kill(1);
      nap(worker, seconds(1));
    }
    for (Thread& life : lives) life.join();
  });
}

/// Worker 1 is replaced after a forward pass; `again` is whether it computes in the same context once more.
void differentiate_through_a_replaced_worker(autograd::PassMode mode, bool again) {
  ClusterOptions options = world();
  options.workers = 1;
  options.open = true;
  options.graceful = true;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    std::vector<Thread> lives;
    const auto start = [&](int incarnation) {
      bool ready = false;
      lives.push_back(cluster.start(1, incarnation, [&, incarnation](rpc::WorkerService& service) {
        ready = true;
        Worker me = service.worker();
        nap(me, seconds(20));
        if (incarnation == 1) service.shutdown(cluster.executor().deadline_in(seconds(60)));
      }));
      while (!ready) nap(worker, milliseconds(10));
      nap(worker, seconds(1));
    };
    start(0);
    {
      Context context(worker);
      at::Tensor loss = worker.rpc_sync("worker1", kOwnTensor).sum();
      cluster.kill(1);
      nap(worker, seconds(1));
      start(1);
      if (again) loss = loss + worker.rpc_sync("worker1", kOwnTensor).sum();
      const Error error = error_of([&] { context.backward(loss, {.mode = mode}); });
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_THAT(error.message(),
                  ::testing::AllOf(::testing::HasSubstr("worker 'worker1' (rank 1) was replaced"),
                                   ::testing::HasSubstr("run the forward pass again in a new Context")));
    }
    Context context(worker);
    EXPECT_NO_THROW(context.backward(worker.rpc_sync("worker1", kOwnTensor).sum(), {.mode = mode}));
    context.release(seconds(1));
    for (Thread& life : lives) life.join();
  });
}

TEST(AutogradDepartures, APassThroughAReplacedWorkerNamesIt) {
  for (const autograd::PassMode mode : {autograd::PassMode::kSmart, autograd::PassMode::kFast}) {
    for (const bool again : {false, true}) {
      SCOPED_TRACE(std::string(mode == autograd::PassMode::kFast ? "FAST" : "SMART") +
                   (again ? ", again" : ""));
      differentiate_through_a_replaced_worker(mode, again);
    }
  }
}

}  // namespace
}  // namespace torchspan::autograd_departures
