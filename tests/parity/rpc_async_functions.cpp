// Functions that return a future or a coroutine, called in the three ways.
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_async_functions {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

using Number = Future<std::int64_t>;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
Number async_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
Task<std::int64_t> await_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
Number async_raise() {
  return make_failed_future<std::int64_t>(std::make_exception_ptr(std::domain_error("Expected error")));
}
Number async_raise_at_once() { throw std::domain_error("Expected error"); }
Task<std::int64_t> await_raise(Worker& worker);
Number async_with_promise(Worker& worker, std::int64_t a, std::int64_t b);
Number async_chained(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b, std::int64_t c);
Number async_nested(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
Number async_multi_chained(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                           std::int64_t step);
Number async_fanout(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                    std::int64_t step);
Task<std::int64_t> await_fanout(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                                std::int64_t step);

struct AsyncAdder {
  explicit AsyncAdder(std::int64_t base) : base(base) {}
  static Number static_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
  Number plus(std::int64_t by) { return make_ready_future<std::int64_t>(base + by); }
  Task<std::int64_t> awaited_plus(std::int64_t by) const { co_return base + by; }
  std::int64_t base;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<async_add> kAsyncAdd{"async_add"};
constexpr Function<await_add> kAwaitAdd{"await_add"};
constexpr Function<async_raise> kAsyncRaise{"async_raise"};
constexpr Function<async_raise_at_once> kAsyncRaiseAtOnce{"async_raise_at_once"};
constexpr Function<await_raise> kAwaitRaise{"await_raise"};
constexpr Function<async_with_promise> kWithPromise{"async_with_promise"};
constexpr Function<async_chained> kChained{"async_chained"};
constexpr Function<async_nested> kNested{"async_nested"};
constexpr Function<async_multi_chained> kMultiChained{"async_multi_chained"};
constexpr Function<async_fanout> kFanout{"async_fanout"};
constexpr Function<await_fanout> kAwaitFanout{"await_fanout"};
constexpr Class<AsyncAdder, std::int64_t> kAsyncAdder{"AsyncAdder"};
constexpr Function<&AsyncAdder::static_add> kStaticAdd{"AsyncAdder.static_add"};
constexpr Function<&AsyncAdder::plus> kPlus{"AsyncAdder.plus"};
constexpr Function<&AsyncAdder::awaited_plus> kAwaitedPlus{"AsyncAdder.awaited_plus"};

Number async_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  return worker.rpc_async(to, kAdd, a, b);
}
Task<std::int64_t> await_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  co_return co_await worker.rpc_async(to, kAdd, a, b);
}
Task<std::int64_t> await_raise(Worker& worker) {
  co_await worker.rpc_async(worker.rank(), kAdd, 1, 2);
  throw std::domain_error("Expected error");
}
Number async_with_promise(Worker& worker, std::int64_t a, std::int64_t b) {
  auto promise = std::make_shared<Promise<std::int64_t>>(worker.backend()->continuations());
  worker.backend()->continuations().lock()->post([promise, a, b] { promise->set_value(a + b); });
  return promise->future();
}
Number async_chained(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b, std::int64_t c) {
  return worker.rpc_async(to, kAdd, a, b).then([c](Number sum) { return sum.wait() + c; });
}
Number async_nested(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  return worker.rpc_async(to, kAsyncAdd, to, a, b);
}
Number async_multi_chained(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                           std::int64_t step) {
  Number sum = worker.rpc_async(to, kAdd, x, 0);
  for (std::int64_t i = 0; i < count; ++i)
    sum = sum.then([step](Number number) { return number.wait() + step; });
  return sum;
}
Number async_fanout(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                    std::int64_t step) {
  struct Gathering {
    Gathering(const std::weak_ptr<ContinuationExecutor>& continuations, std::int64_t count)
        : promise(continuations), left(count) {}
    Promise<std::int64_t> promise;
    std::atomic<std::int64_t> sum{0};
    std::atomic<std::int64_t> left;
  };
  auto all = std::make_shared<Gathering>(worker.backend()->continuations(), count);
  Number result = all->promise.future();
  for (std::int64_t i = 0; i < count; ++i) {
    worker.rpc_async(to, kAdd, x, i * step).add_done_callback([all](Number number) {
      all->sum += number.wait();
      if (--all->left == 0) all->promise.set_value(all->sum.load());
    });
  }
  return result;
}
Task<std::int64_t> await_fanout(Worker& worker, const WorkerInfo& to, std::int64_t x, std::int64_t count,
                                std::int64_t step) {
  std::vector<Number> calls;
  for (std::int64_t i = 0; i < count; ++i) calls.push_back(worker.rpc_async(to, kAdd, x, i * step));
  std::int64_t sum = 0;
  for (const Number& call : calls) sum += co_await call;
  co_return sum;
}
Number AsyncAdder::static_add(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  return async_add(worker, to, a, b);
}

/// With one handler thread per worker, a function that held it while it waits for another would never end.
ClusterOptions world(int workers = 3) {
  ClusterOptions options = world_of(
      workers, FunctionTable().add(kAdd, kAsyncAdd, kAwaitAdd, kAsyncRaise, kAsyncRaiseAtOnce, kAwaitRaise,
                                   kWithPromise, kChained, kNested, kMultiChained, kFanout, kAwaitFanout,
                                   kAsyncAdder, kStaticAdd, kPlus, kAwaitedPlus));
  options.threads = 1;
  return options;
}

/// Calls the function on worker1 by rpc_sync, rpc_async and remote.
template <auto kFunction, class... Args>
void expect_in_all_modes(Worker& worker, std::int64_t expected, Function<kFunction> token,
                         const Args&... args) {
  EXPECT_EQ(worker.rpc_sync("worker1", token, args...), expected) << token.name;
  EXPECT_EQ(worker.rpc_async("worker1", token, args...).wait(), expected) << token.name;
  EXPECT_EQ(worker.remote("worker1", token, args...).to_here(), expected) << token.name;
}

// peer: rpc_test.py async_function_simple: same
TEST(RpcConformance, AsyncFunctionSimple) {
  on_first(world(), [](Worker& worker) {
    for (const WorkerInfo& to : worker.workers()) {
      expect_in_all_modes(worker, 3, kAsyncAdd, to, 1, 2);
      expect_in_all_modes(worker, 3, kAwaitAdd, to, 1, 2);
    }
  });
}

template <auto kFunction>
void expect_raise_in_all_modes(Worker& worker, Function<kFunction> token) {
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { worker.rpc_sync("worker1", token); }, [&] { worker.rpc_async("worker1", token).wait(); },
           [&] { worker.remote("worker1", token).to_here(); }}) {
    const Error error = error_of(call);
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << token.name;
    ASSERT_EQ(error.frames().size(), 1u) << error.what();
    EXPECT_EQ(error.frames()[0].text, "Expected error");
    EXPECT_EQ(error.frames()[0].type, "std::domain_error");
    EXPECT_EQ(error.frames()[0].worker, "worker1");
  }
}

// peer: rpc_test.py async_function_raise: same
TEST(RpcConformance, AsyncFunctionRaise) {
  on_first(world(), [](Worker& worker) { expect_raise_in_all_modes(worker, kAsyncRaise); });
  on_first(world(), [](Worker& worker) { expect_raise_in_all_modes(worker, kAsyncRaiseAtOnce); });
  on_first(world(), [](Worker& worker) { expect_raise_in_all_modes(worker, kAwaitRaise); });
}

// The return type decides whether a function is asynchronous, so a wrong one does not compile.
// peer: rpc_test.py async_function_wrong_return_type: better: the return type says whether a function is
//   asynchronous, so it cannot be wrong
TEST(RpcConformance, AsyncFunctionWrongReturnType) {
  static_assert(std::is_same_v<rpc::ResultOf<add>, std::int64_t>);
  static_assert(std::is_same_v<rpc::ResultOf<async_add>, std::int64_t>);
  static_assert(std::is_same_v<rpc::ResultOf<await_add>, std::int64_t>);
}

// peer: rpc_test.py async_function_with_future_ctor: same
TEST(RpcConformance, AsyncFunctionWithFutureCtor) {
  on_first(world(), [](Worker& worker) { expect_in_all_modes(worker, 5, kWithPromise, 2, 3); });
}

// peer: rpc_test.py async_function_chained: same
TEST(RpcConformance, AsyncFunctionChained) {
  on_first(world(),
           [](Worker& worker) { expect_in_all_modes(worker, 6, kChained, worker.info("worker2"), 1, 2, 3); });
}

// peer: rpc_test.py async_function_nested: same
TEST(RpcConformance, AsyncFunctionNested) {
  on_first(world(), [](Worker& worker) {
    expect_in_all_modes(worker, 3, kNested, worker.info("worker2"), 1, 2);
    expect_in_all_modes(worker, 3, kNested, worker.info(), 1, 2);
  });
}

// peer: rpc_test.py async_function_multi_chained: same
TEST(RpcConformance, AsyncFunctionMultiChained) {
  on_first(world(), [](Worker& worker) {
    expect_in_all_modes(worker, 1 + 20 * 3, kMultiChained, worker.info("worker2"), 1, 20, 3);
  });
}

// peer: rpc_test.py async_function_multi_fanout: same
TEST(RpcConformance, AsyncFunctionMultiFanout) {
  on_first(world(), [](Worker& worker) {
    const std::int64_t expected = 20 * 5 + 2 * (19 * 20 / 2);
    expect_in_all_modes(worker, expected, kFanout, worker.info("worker2"), 5, 20, 2);
    expect_in_all_modes(worker, expected, kAwaitFanout, worker.info("worker2"), 5, 20, 2);
  });
}

// peer: rpc_test.py async_static_method: same
TEST(RpcConformance, AsyncStaticMethod) {
  on_first(world(),
           [](Worker& worker) { expect_in_all_modes(worker, 3, kStaticAdd, worker.info("worker2"), 1, 2); });
}

// peer: rpc_test.py async_class_method: same
TEST(RpcConformance, AsyncClassMethod) {
  on_first(world(), [](Worker& worker) {
    auto adder = worker.remote("worker1", kAsyncAdder, 100);
    EXPECT_EQ(worker.call_on(adder, kPlus, 1).wait(), 101);
    EXPECT_EQ(worker.call_on(adder, kAwaitedPlus, 2).wait(), 102);
  });
}

// peer: rpc_test.py async_class_rref_proxy: same
// peer: rpc_test.py async_class_rref_proxy_async: same
// peer: rpc_test.py async_class_rref_proxy_remote: same
TEST(RpcConformance, AsyncClassRrefProxy) {
  on_first(world(), [](Worker& worker) {
    auto adder = worker.remote("worker1", kAsyncAdder, 100);
    EXPECT_EQ(adder.rpc_sync(kPlus, 1), 101);
    EXPECT_EQ(adder.rpc_async(kAwaitedPlus, 2).wait(), 102);
    EXPECT_EQ(adder.remote(kPlus, 3).to_here(), 103);
    EXPECT_EQ(adder.remote(kAwaitedPlus, 4).to_here(), 104);
  });
}

}  // namespace
}  // namespace torchspan::rpc_async_functions
