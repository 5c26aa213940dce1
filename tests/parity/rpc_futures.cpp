// Futures and their continuations, on the caller and inside handlers.
#include <ATen/ATen.h>

#include <torchspan/core/future.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_futures {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

using Number = Future<std::int64_t>;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t raise_func() { throw std::domain_error("Expected error"); }
std::int64_t slow_add(Worker& worker, std::int64_t a, std::int64_t b) {
  nap(worker, seconds(1));
  return a + b;
}
std::int64_t add_use_future(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
std::int64_t add_with_callback(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
std::int64_t complete_my_own_future(Worker& worker);

constexpr Function<add> kAdd{"add"};
constexpr Function<raise_func> kRaise{"raise_func"};
constexpr Function<slow_add> kSlowAdd{"slow_add"};
constexpr Function<add_use_future> kAddUseFuture{"add_use_future"};
constexpr Function<add_with_callback> kAddWithCallback{"add_with_callback"};
constexpr Function<complete_my_own_future> kCompleteMine{"complete_my_own_future"};

std::int64_t add_use_future(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  Promise<std::int64_t> promise(worker.backend()->continuations());
  worker.rpc_async(to, kAdd, a, b).add_done_callback([&](Number sum) { promise.set_value(sum.wait()); });
  return promise.future().wait();
}
std::int64_t add_with_callback(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  return worker.rpc_async(to, kAdd, a, b)
      .then([worker, to](Number sum) { return worker.rpc_sync(to, kAdd, sum.wait(), 1); })
      .wait();
}
std::int64_t complete_my_own_future(Worker& worker) {
  auto promise = std::make_shared<Promise<std::int64_t>>(worker.backend()->continuations());
  auto later = promise->future().then([](Number number) { return number.wait() + 1; });
  worker.backend()->continuations().lock()->post([promise] { promise->set_value(41); });
  return later.wait();
}

ClusterOptions world(int workers = 2) {
  return world_of(
      workers, FunctionTable().add(kAdd, kRaise, kSlowAdd, kAddUseFuture, kAddWithCallback, kCompleteMine));
}

// peer: rpc_test.py callback_simple: same
TEST(RpcConformance, CallbackSimple) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", kAdd, 1, 2);
    EXPECT_EQ(sum.then([](Number number) { return number.wait() + 1; }).wait(), 4);
    EXPECT_EQ(sum.wait(), 3);
    auto late = sum.then([](Number number) { return std::to_string(number.wait()); });
    EXPECT_EQ(late.wait(), "3") << "a continuation of a completed future runs too";
  });
}

// peer: rpc_test.py callback_multi: same
TEST(RpcConformance, CallbackMulti) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", kAdd, 1, 2);
    std::vector<Number> more;
    for (std::int64_t i = 0; i < 10; ++i) more.push_back(sum.then([i](Number n) { return n.wait() + i; }));
    for (std::int64_t i = 0; i < 10; ++i) EXPECT_EQ(more[i].wait(), 3 + i);
  });
}

// peer: rpc_test.py callback_chain: same
TEST(RpcConformance, CallbackChain) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", kAdd, 1, 2);
    for (int i = 0; i < 20; ++i) sum = sum.then([](Number number) { return number.wait() + 1; });
    EXPECT_EQ(sum.wait(), 23);
  });
}

// peer: rpc_test.py callback_none: differs: the failure completes the derived future
TEST(RpcConformance, CallbackNone) {
  on_first(world(), [](Worker& worker) {
    const std::function<std::int64_t(Number)> none;
    auto sum = worker.rpc_async("worker1", kAdd, 1, 2);
    EXPECT_THROW(sum.then(none).wait(), std::bad_function_call);
    EXPECT_EQ(sum.wait(), 3);
  });
}

// peer: rpc_test.py callback_in_rpc: same
TEST(RpcConformance, CallbackInRpc) {
  on_first(world(3), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kAddWithCallback, worker.info("worker2"), 1, 2), 4);
    EXPECT_EQ(worker.rpc_sync("worker1", kAddWithCallback, worker.info(), 1, 2), 4);
  });
}

// peer: rpc_test.py callback_with_ret: same
TEST(RpcConformance, CallbackWithRet) {
  on_first(world(3), [](Worker& worker) {
    auto nested = worker.rpc_async("worker1", kAdd, 1, 2).then([&](Number sum) {
      return worker.rpc_async("worker2", kAdd, sum.wait(), 10).wait();
    });
    EXPECT_EQ(nested.wait(), 13);
  });
}

// peer: rpc_test.py callback_with_error: same
TEST(RpcConformance, CallbackWithError) {
  on_first(world(), [](Worker& worker) {
    bool ran = false;
    auto derived = worker.rpc_async("worker1", kRaise).then([&](Number number) -> std::int64_t {
      ran = true;
      EXPECT_TRUE(number.error());
      const Error error = error_of([&] { number.wait(); });
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      throw std::out_of_range("another error in the callback");
    });
    EXPECT_THROW(derived.wait(), std::out_of_range);
    EXPECT_TRUE(ran);
    auto passed_on = worker.rpc_async("worker1", kRaise).then([](Number number) { return number.wait(); });
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { passed_on.wait(); });
  });
}

template <class F>
concept Continues = requires(Number number, F callback) {
  number.then(callback);
};

// peer: rpc_test.py callback_wrong_arg_num: better: does not compile
TEST(RpcConformance, CallbackWrongArgNum) {
  auto none = [] { return 1; };
  auto one = [](Number) { return 1; };
  auto two = [](Number, std::int64_t) { return 1; };
  static_assert(!Continues<decltype(none)> && Continues<decltype(one)> && !Continues<decltype(two)>);
}

// peer: rpc_test.py callback_wrong_arg_type: better: does not compile
TEST(RpcConformance, CallbackWrongArgType) {
  auto value = [](std::int64_t) { return 1; };
  auto other = [](Future<std::string>) { return 1; };
  static_assert(!Continues<decltype(value)> && !Continues<decltype(other)>);
}

// peer: rpc_test.py add_done_callback: same
TEST(RpcConformance, AddDoneCallback) {
  on_first(world(), [](Worker& worker) {
    int runs = 0;
    auto done = worker.rpc_async("worker1", kAdd, 1, 2).then([&](Number number) {
      if (number.wait() == 3) ++runs;
    });
    static_assert(std::is_same_v<decltype(done), Future<void>>);
    done.wait();
    done.wait();
    nap(worker, seconds(1));
    EXPECT_EQ(runs, 1);
  });
}

// peer: rpc_test.py mark_future_twice: differs: the first value stays; the second set returns false and
//   throws nothing
TEST(RpcConformance, MarkFutureTwice) {
  on_first(world(), [](Worker& worker) {
    Promise<std::int64_t> promise(worker.backend()->continuations());
    EXPECT_TRUE(promise.set_value(3));
    EXPECT_FALSE(promise.set_value(4));
    EXPECT_FALSE(promise.set_error(Error(ErrorKind::kInvalid, "too late")));
    EXPECT_EQ(promise.future().wait(), 3);
  });
}

// peer: rpc_test.py future_done: same
TEST(RpcConformance, FutureDone) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", kSlowAdd, 1, 2);
    EXPECT_FALSE(sum.done());
    EXPECT_EQ(sum.wait(), 3);
    EXPECT_TRUE(sum.done());
    EXPECT_FALSE(sum.error());
  });
}

// peer: rpc_test.py future_done_exception: same
TEST(RpcConformance, FutureDoneException) {
  on_first(world(), [](Worker& worker) {
    auto failure = worker.rpc_async("worker1", kRaise);
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { failure.wait(); });
    EXPECT_TRUE(failure.done());
    EXPECT_TRUE(failure.error());
  });
}

// peer: rpc_test.py future_in_rpc: same
TEST(RpcConformance, FutureInRpc) {
  on_first(world(3), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kAddUseFuture, worker.info("worker2"), 1, 2), 3);
    EXPECT_EQ(worker.rpc_sync("worker1", kCompleteMine), 42);
    EXPECT_EQ(worker.rpc_sync("worker0", kCompleteMine), 42);
  });
}

// peer: rpc_test.py future_nested_callback: same
TEST(RpcConformance, FutureNestedCallback) {
  on_first(world(3), [](Worker& worker) {
    auto outer = worker.rpc_async("worker1", kAddUseFuture, worker.info("worker2"), 1, 2);
    auto inner = outer.then([&](Number number) {
      return worker.rpc_async("worker1", kAdd, number.wait(), 1)
          .then([](Number next) { return next.wait() * 100; })
          .wait();
    });
    EXPECT_EQ(inner.wait(), 400);
  });
}

// peer: rpc_test.py pickle_future: better: does not compile
TEST(RpcConformance, PickleFuture) {
  static_assert(wire::Transferable<std::int64_t>);
  static_assert(!wire::Transferable<Future<std::int64_t>>, "a future stays on its worker");
}

// peer: rpc_test.py (documented) wait with a limit: same
TEST(RpcConformance, FutureWaitTimesOutAndCompletesLater) {
  on_first(world(), [](Worker& worker) {
    auto sum = worker.rpc_async("worker1", kSlowAdd, 1, 2);
    EXPECT_EQ(error_of([&] { sum.wait(milliseconds(10)); }).kind(), ErrorKind::kTimedOut);
    EXPECT_FALSE(sum.done());
    EXPECT_EQ(sum.wait(), 3);
  });
}

// peer: rpc_test.py (documented) a future that is never completed: better: a dropped promise fails its
//   future
TEST(RpcConformance, DroppedPromiseFailsItsFuture) {
  on_first(world(), [](Worker& worker) {
    Number orphan;
    {
      Promise<std::int64_t> promise(worker.backend()->continuations());
      orphan = promise.future();
    }
    expect_error(ErrorKind::kCancelled, "dropped", [&] { orphan.wait(); });
  });
}

// peer: rpc_test.py wait_all_with_exception: same
TEST(RpcConformance, WaitAllWithException) {
  on_first(world(), [](Worker& worker) {
    std::vector<Number> futures;
    for (int i = 0; i < 10; ++i) futures.push_back(worker.rpc_async("worker1", kRaise));
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { wait_all(futures); });
    for (const auto& future : futures) {
      expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { future.wait(); });
    }
  });
}

// peer: rpc_test.py wait_all_with_partial_exception: same
TEST(RpcConformance, WaitAllWithPartialException) {
  on_first(world(), [](Worker& worker) {
    std::vector<Number> futures;
    for (int i = 0; i < 10; ++i) futures.push_back(worker.rpc_async("worker1", kAdd, i, i));
    EXPECT_EQ(wait_all(futures), (std::vector<std::int64_t>{0, 2, 4, 6, 8, 10, 12, 14, 16, 18}));
    futures.push_back(worker.rpc_async("worker1", kRaise));
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { wait_all(futures); });
    for (int i = 0; i < 10; ++i) EXPECT_EQ(futures[i].wait(), 2 * i);
  });
}

/// The first failure arrives while another call still runs.
template <class T>
void expect_early_exit(Worker& worker, Future<T> slow, Future<T> failing) {
  const TimePoint begin = now(worker);
  expect_error(ErrorKind::kRemoteFailure, "worker1", [&] {
    wait_all(std::vector<Future<T>>{slow, failing});
  });
  EXPECT_LT(now(worker) - begin, milliseconds(100));
  EXPECT_FALSE(slow.done());
  slow.wait();
}

// peer: rpc_test.py wait_all_exit_early_python: same
TEST(RpcConformance, WaitAllExitEarlyPython) {
  on_first(world(3), [](Worker& worker) {
    expect_early_exit(worker, worker.rpc_async("worker2", kSlowAdd, 1, 2),
                      worker.rpc_async("worker1", kRaise));
  });
}

// peer: rpc_test.py wait_all_exit_early_builtin: same
TEST(RpcConformance, WaitAllExitEarlyBuiltin) {
  on_first(world(3), [](Worker& worker) {
    auto slow =
        worker.rpc_async("worker2", kSlowAdd, 1, 2).then([](Number sum) { return c10::IValue(sum.wait()); });
    expect_early_exit(worker, slow, worker.rpc_async("worker1", "aten::mm", {at::ones({2}), at::ones({3})}));
  });
}

}  // namespace
}  // namespace torchspan::rpc_futures
