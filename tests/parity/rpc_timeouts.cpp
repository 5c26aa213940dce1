// Timeouts: the worker's default, those of single calls, and what happens when they expire.
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_timeouts {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t sleep_for(Worker& worker, Duration time) {
  nap(worker, time);
  return 17;
}
struct Sleeper {
  explicit Sleeper(std::int64_t value) : value(value) {}
  std::int64_t get() const { return value; }
  std::int64_t value;
};
std::int64_t slow_get(Worker& worker, const RRef<Sleeper>& sleeper, Duration time) {
  nap(worker, time);
  return sleeper.local_value().get();
}
struct ConcurrentCalls {
  int inside = 0;
  int most = 0;
};
void count_concurrent(Worker& worker) {
  ConcurrentCalls& concurrency = state_of<ConcurrentCalls>(worker);
  concurrency.most = std::max(concurrency.most, ++concurrency.inside);
  nap(worker, seconds(1));
  --concurrency.inside;
}

constexpr Function<add> kAdd{"add"};
constexpr Function<sleep_for> kSleep{"sleep_for"};
constexpr Class<Sleeper, std::int64_t> kSleeper{"Sleeper"};
constexpr Function<&Sleeper::get> kGet{"Sleeper.get"};
constexpr Function<slow_get> kSlowGet{"slow_get"};
constexpr Function<count_concurrent> kCountConcurrent{"count_concurrent"};

ClusterOptions world(int workers = 2) {
  return world_of(workers, FunctionTable().add(kAdd, kSleep, kSleeper, kGet, kSlowGet, kCountConcurrent));
}

/// Expects that `call` times out on worker1 `limit` after now.
template <class F>
void expect_timeout(Worker& worker, Duration limit, F&& call) {
  const TimePoint begin = now(worker);
  const Error error = error_of(std::forward<F>(call));
  EXPECT_EQ(error.kind(), ErrorKind::kTimedOut) << error.what();
  EXPECT_EQ(error.worker(), "worker1") << error.what();
  EXPECT_GE(now(worker) - begin, limit);
  EXPECT_LE(now(worker) - begin, limit + milliseconds(5));
}

// peer: rpc_test.py set_and_get_default_rpc_timeout: same
TEST(RpcConformance, SetAndGetDefaultRpcTimeout) {
  ClusterOptions options = world();
  options.default_timeout = milliseconds(500);
  on_first(options, [](Worker& worker) {
    EXPECT_EQ(worker.default_timeout(), milliseconds(500));
    worker.set_default_timeout(seconds(7));
    EXPECT_EQ(worker.default_timeout(), seconds(7));
    expect_timeout(worker, seconds(7), [&] { worker.rpc_sync("worker1", kSleep, seconds(8)); });
  });
  on_first(world(), [](Worker& worker) { EXPECT_EQ(worker.default_timeout(), seconds(60)); });
}

// peer: rpc_test.py tensorpipe_set_default_timeout: same
TEST(RpcConformance, TensorpipeSetDefaultTimeout) {
  ClusterOptions options = world();
  options.default_timeout = milliseconds(500);
  on_first(options, [](Worker& worker) {
    expect_timeout(worker, milliseconds(500), [&] { worker.rpc_sync("worker1", kSleep, seconds(1)); });
  });
}

// peer: rpc_test.py default_timeout_used: same
TEST(RpcConformance, DefaultTimeoutUsed) {
  on_first(world(), [](Worker& worker) {
    worker.set_default_timeout(milliseconds(1));
    std::vector<Future<std::int64_t>> short_ones;
    for (int i = 0; i < 10; ++i) short_ones.push_back(worker.rpc_async("worker1", kSleep, seconds(1)));
    worker.set_default_timeout(seconds(200));
    auto long_one = worker.rpc_async("worker1", kSleep, seconds(100));
    worker.set_default_timeout(Duration::zero());
    auto endless = worker.rpc_async("worker1", kSleep, minutes(5));
    expect_timeout(worker, milliseconds(1), [&] { short_ones[0].wait(); });
    for (const auto& call : short_ones) {
      EXPECT_EQ(error_of([&] { call.wait(); }).kind(), ErrorKind::kTimedOut);
    }
    EXPECT_EQ(long_one.wait(), 17);
    EXPECT_EQ(endless.wait(), 17);
  });
}

// peer: rpc_test.py rpc_timeouts: same
TEST(RpcConformance, RpcTimeouts) {
  on_first(world(), [](Worker& worker) {
    const Caller hurried = worker.with({.timeout = milliseconds(100)});
    const Caller patient = worker.with({.timeout = seconds(10)});
    const Caller endless = worker.with({.timeout = Duration::zero()});
    expect_timeout(worker, milliseconds(100), [&] { hurried.rpc_sync("worker1", kSleep, seconds(2)); });
    expect_timeout(worker, milliseconds(100),
                   [&] { hurried.rpc_async("worker1", kSleep, seconds(2)).wait(); });
    EXPECT_EQ(hurried.rpc_sync("worker1", kAdd, 1, 2), 3);
    worker.set_default_timeout(milliseconds(1));
    EXPECT_EQ(patient.rpc_sync("worker1", kSleep, seconds(2)), 17);
    EXPECT_EQ(endless.rpc_sync("worker1", kSleep, seconds(200)), 17);
    expect_timeout(worker, milliseconds(1), [&] { worker.rpc_sync("worker1", kSleep, seconds(2)); });
  });
}

// peer: rpc_test.py rpc_builtin_timeout: same
TEST(RpcConformance, RpcBuiltinTimeout) {
  ClusterOptions options = world();
  options.seed = 2;
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    auto add = [&](const Caller& caller) { return caller.rpc_sync("worker1", "aten::add", {1, 2}).toInt(); };
    EXPECT_EQ(add(worker), 3);
    cluster.network().delay_if(
        [](const net::SimMessage& message) {
          return message.from == "sim:worker0" && message.to == "sim:worker1";
        },
        seconds(2));
    expect_timeout(worker, seconds(1), [&] { add(worker.with({.timeout = seconds(1)})); });
    worker.set_default_timeout(milliseconds(1));
    expect_timeout(worker, milliseconds(1), [&] { add(worker); });
    EXPECT_EQ(add(worker.with({.timeout = seconds(60)})), 3);
    EXPECT_EQ(add(worker.with({.timeout = Duration::zero()})), 3);
    cluster.network().delay_if({}, {});
  });
}

// peer: rpc_test.py (documented) replies and limits share the pool of the handlers: better: limits hold
//   while every handler thread is busy
TEST(RpcConformance, TimesOutWhileEveryHandlerThreadIsBusy) {
  ClusterOptions options = world();
  options.threads = 1;
  on_all(options, [](Worker& worker) {
    auto busy = worker.rpc_async(1 - worker.rank(), kSleep, seconds(30));
    const TimePoint begin = now(worker);
    const Error error =
        error_of([&] { worker.with({.timeout = seconds(1)}).rpc_sync(1 - worker.rank(), kAdd, 1, 2); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
    EXPECT_LT(now(worker) - begin, seconds(2));
    EXPECT_EQ(busy.wait(), 17);
  });
}

// peer: rpc_test.py/rref rref_timeout: same
TEST(RpcConformance, RrefTimeout) {
  on_first(world(), [](Worker& worker) {
    auto rref = worker.with({.timeout = milliseconds(500)}).remote("worker1", kSleep, seconds(2));
    expect_timeout(worker, milliseconds(500), [&] { rref.creation().wait(); });
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { rref.to_here(); });
    nap(worker, seconds(5));
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { rref.to_here(); });
  });
}

// peer: rpc_test.py/rref rref_to_here_timeout: same
TEST(RpcConformance, RrefToHereTimeout) {
  on_first(world(), [](Worker& worker) {
    auto rref = worker.remote("worker1", kSleep, seconds(2));
    expect_timeout(worker, milliseconds(10), [&] { rref.to_here(milliseconds(10)); });
    EXPECT_EQ(rref.to_here(), 17);
    EXPECT_EQ(rref.to_here(milliseconds(10)), 17);
  });
}

// peer: rpc_test.py/rref rref_proxy_timeout: same
TEST(RpcConformance, RrefProxyTimeout) {
  on_first(world(), [](Worker& worker) {
    auto sleeper = worker.remote("worker1", kSleeper, 5);
    const auto brief = sleeper.with({.timeout = milliseconds(100)});
    expect_timeout(worker, milliseconds(100), [&] { brief.rpc_sync(kSlowGet, seconds(2)); });
    expect_timeout(worker, milliseconds(100), [&] { brief.rpc_async(kSlowGet, seconds(2)).wait(); });
    auto made = brief.remote(kSlowGet, seconds(2));
    expect_timeout(worker, milliseconds(100), [&] { made.creation().wait(); });
    const auto late = worker.remote("worker1", kSleep, seconds(2));
    expect_timeout(worker, milliseconds(100), [&] { late.with({.timeout = milliseconds(100)}).to_here(); });
    worker.runtime().executor.sleep(seconds(10));  // the threads of the callee have finished
    EXPECT_EQ(brief.rpc_sync(kGet), 5);
    const Caller hurried = worker.with({.timeout = milliseconds(100)});
    expect_timeout(worker, milliseconds(100), [&] { hurried.call_on(sleeper, kSlowGet, seconds(2)).wait(); });
    auto created = hurried.create_on(sleeper, kSlowGet, seconds(2));
    expect_timeout(worker, milliseconds(100), [&] { created.creation().wait(); });
    expect_error(ErrorKind::kTimedOut, "worker1", [&] { created.to_here(); });
    EXPECT_EQ(hurried.call_on(sleeper, kGet).wait(), 5);
    EXPECT_EQ(sleeper.rpc_sync(kSlowGet, seconds(2)), 5);
    worker.set_default_timeout(milliseconds(50));
    expect_timeout(worker, milliseconds(50), [&] { sleeper.rpc_sync(kSlowGet, seconds(2)); });
    EXPECT_EQ(worker.with({.timeout = Duration::zero()}).call_on(sleeper, kSlowGet, seconds(2)).wait(), 5);
  });
}

// peer: rpc_test.py set_and_get_num_worker_threads: same
// peer: dist_autograd_test.py verify_backend_options: differs: there is no backend to name; a row of remote
//   calls checks that the given options take effect
TEST(RpcConformance, SetAndGetNumWorkerThreads) {
  for (const int threads : {1, 2, 5}) {
    ConcurrentCalls concurrency;
    ClusterOptions options = with_state(world(), concurrency);
    options.threads = static_cast<std::size_t>(threads);
    on_first(options, [&](Worker& worker) {
      concurrency = {};
      std::vector<Future<void>> calls;
      for (int i = 0; i < 10; ++i) calls.push_back(worker.rpc_async("worker1", kCountConcurrent));
      for (const auto& call : calls) call.wait();
      EXPECT_EQ(concurrency.most, threads);
    });
  }
}

}  // namespace
}  // namespace torchspan::rpc_timeouts
