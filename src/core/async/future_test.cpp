#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdexcept>
#include <string>
#include <thread>

#include <torchspan/core/future.h>

#include "core/async/trials.h"
#include "tests/support/errors.h"

namespace torchspan::future_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;
using torchspan::testing::kind_of;

template <class T>
ErrorKind failure_of(const Future<T>& future) {
  return to_error(future.error()).kind();
}

TEST(Future, GivesItsValueToEveryCopyAnyNumberOfTimes) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<std::string> promise(pool.continuations());
    const Future<std::string> future = promise.future();
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): what is tested
    const Future<std::string> copy = future;
    EXPECT_TRUE(future.valid());
    EXPECT_FALSE(future.done());
    Thread thread = executor.spawn("sets", [&] { promise.set_value("hello"); });
    EXPECT_EQ(copy.wait(), "hello");
    EXPECT_EQ(future.wait(), "hello");
    EXPECT_EQ(future.wait(0s), "hello");
    EXPECT_TRUE(future.done());
    EXPECT_EQ(future.error(), nullptr);
  });
  EXPECT_FALSE(Future<int>().valid());
}

TEST(Future, ServesVoidAndTypesWithoutDefault) {
  struct OnlyFrom {
    explicit OnlyFrom(int number) : number(number) {}
    int number;
  };
  Promise<void> nothing{std::weak_ptr<ContinuationExecutor>()};
  EXPECT_TRUE(nothing.set_value());
  nothing.future().wait();
  Promise<OnlyFrom> something{std::weak_ptr<ContinuationExecutor>()};
  EXPECT_TRUE(something.set_value(7));
  EXPECT_EQ(something.future().wait().number, 7);
}

/// Counts who passes; its work is done after so many looks.
class CountingGate final : public ValueGate {
 public:
  explicit CountingGate(int looks = 0) : looks_(looks) {}
  void pass() const override {
    if (failed) throw Error(ErrorKind::kDisconnected, "the device failed");
    ++passed;
  }
  std::shared_ptr<const ValueGate> renew() const override {
    ++renewed;
    return std::make_shared<CountingGate>();
  }
  bool done() const override { return --looks_ < 0; }
  mutable std::atomic<int> passed{0}, renewed{0};
  bool failed = false;

 private:
  mutable std::atomic<int> looks_;
};

TEST(ValueGate, IsPassedByEveryTakerAndRenewedForContinuations) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    const auto gate = std::make_shared<CountingGate>();
    Promise<int> promise(pool.continuations());
    const Future<int> future = promise.future();
    const Future<int> later = future.then([](const Future<int>& done) { return done.wait() + 1; });
    promise.set_value_behind(gate, 4);
    EXPECT_EQ(later.wait(), 5);
    EXPECT_EQ(future.wait(), 4);
    EXPECT_EQ(gate->passed.load(), 2);
    EXPECT_EQ(gate->renewed.load(), 1);
    EXPECT_NE(later.gate(), gate);
    EXPECT_NE(later.gate(), nullptr);
    EXPECT_EQ(make_ready_future<int>(3).gate(), nullptr);
  });
}

TEST(ValueGate, OfSeveralFuturesIsPassedForAll) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    const auto first = std::make_shared<CountingGate>(), second = std::make_shared<CountingGate>();
    Promise<int> one(pool.continuations()), other(pool.continuations());
    const auto both = when_all(std::vector<Future<int>>{one.future(), other.future()});
    one.set_value_behind(first, 1);
    other.set_value_behind(second, 2);
    EXPECT_EQ(both.wait(), (std::vector<int>{1, 2}));
    EXPECT_EQ(first->passed.load(), 1);
    EXPECT_EQ(second->passed.load(), 1);
    EXPECT_NE(both.gate(), nullptr);
  });
}

TEST(ValueGate, MakesSynchronizeWaitAndReportsItsFailure) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    const auto gate = std::make_shared<CountingGate>(3);
    Promise<int> promise(pool.continuations());
    promise.set_value_behind(gate, 4);
    EXPECT_EQ(promise.future().synchronize(executor.deadline_in(10s)), 4);
    const auto never = std::make_shared<CountingGate>(1 << 30);
    Promise<int> slow(pool.continuations());
    slow.set_value_behind(never, 4);
    EXPECT_EQ(kind_of([&] { slow.future().synchronize(executor.deadline_in(1ms)); }), ErrorKind::kTimedOut);
    never->failed = true;
    EXPECT_EQ(kind_of([&] { slow.future().wait(); }), ErrorKind::kDisconnected);
  });
}

TEST(Promise, LetsTheFirstOfManySettersWin) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    std::atomic<int> wins{0}, winner{-1};
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.push_back(executor.spawn("sets", [&, i] {
        executor.yield();
        const bool won = i % 2 == 0 ? promise.set_value(i)
                                    : promise.set_error(Error(ErrorKind::kInvalid, std::to_string(i)));
        if (!won) return;
        ++wins;
        winner = i;
      }));
    }
    int seen = -1;
    try {
      seen = promise.future().wait();
    } catch (const Error& error) {
      seen = std::stoi(error.message());
    }
    threads.clear();
    EXPECT_EQ(wins, 1);
    EXPECT_EQ(seen, winner);
  });
}

TEST(Promise, LeavesALosingValueWithItsOwner) {
  Promise<std::string> promise{std::weak_ptr<ContinuationExecutor>()};
  promise.set_value("first");
  std::string second = "second, which is too long to be kept in place";
  EXPECT_FALSE(promise.set_value(std::move(second)));
  // NOLINTNEXTLINE(bugprone-use-after-move): what is tested
  EXPECT_EQ(second, "second, which is too long to be kept in place");
  EXPECT_EQ(promise.future().wait(), "first");
}

TEST(Promise, CancelsItsFutureWhenDropped) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    auto promise = std::make_unique<Promise<int>>(pool.continuations());
    const Future<int> future = promise->future();
    Thread thread = executor.spawn("drops", [&] { promise.reset(); });
    EXPECT_EQ(kind_of([&] { future.wait(); }), ErrorKind::kCancelled);
  });
}

TEST(Promise, CancelsItsFutureWhenAnotherPromiseIsMovedIn) {
  Promise<int> promise{std::weak_ptr<ContinuationExecutor>()}, other{std::weak_ptr<ContinuationExecutor>()};
  const Future<int> old = promise.future(), fresh = other.future();
  promise = std::move(other);
  ASSERT_TRUE(old.done());
  EXPECT_EQ(failure_of(old), ErrorKind::kCancelled);
  EXPECT_FALSE(fresh.done());
  Promise<int>& same = promise;
  promise = std::move(same);
  EXPECT_FALSE(fresh.done());
  EXPECT_TRUE(promise.set_value(1));
  EXPECT_FALSE(other.set_value(2)) << "it was moved away";  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_EQ(fresh.wait(), 1);
}

TEST(Promise, FailsItsFutureWhenTheValueCannotBeStored) {
  struct Fragile {
    explicit Fragile(int) { throw std::out_of_range("cannot be made"); }
  };
  Promise<Fragile> promise{std::weak_ptr<ContinuationExecutor>()};
  promise.set_from([] { return 1; });
  ASSERT_TRUE(promise.future().done());
  EXPECT_THROW(promise.future().wait(), std::out_of_range);
}

TEST(Promise, TakesTheResultOrExceptionOfABody) {
  Promise<int> value{std::weak_ptr<ContinuationExecutor>()}, failure{std::weak_ptr<ContinuationExecutor>()};
  value.set_from([] { return 5; });
  failure.set_from([]() -> int { throw std::length_error("too long"); });
  EXPECT_EQ(value.future().wait(), 5);
  EXPECT_THROW(failure.future().wait(), std::length_error);
}

// The waiter may own the promise and destroy it at once; the setter must not touch it after that.
TEST(Promise, CanBeDestroyedByTheWaiterOnceTheValueIsSet) {
  const auto executor = make_executor();
  OwnedPool pool(*executor);
  std::atomic<Promise<int>*> offered{nullptr};
  std::atomic<bool> stop{false};
  Thread setter = executor->spawn("sets", [&] {
    while (!stop) {
      if (Promise<int>* promise = offered.exchange(nullptr)) {
        promise->set_value(1);
      } else {
        executor->yield();
      }
    }
  });
  for (int i = 0; i < 2000; ++i) {
    auto promise = std::make_unique<Promise<int>>(pool.continuations());
    auto future = promise->future();
    offered = promise.get();
    EXPECT_EQ(future.wait(), 1);
  }
  stop = true;
}

TEST(FutureWait, TimesOutAtItsDeadlineAndReportsTheElapsedTime) {
  for_seeds(20, [](SimExecutor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    try {
      promise.future().wait(250ms);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
      EXPECT_EQ(error.elapsed(), 250ms);
    }
    EXPECT_EQ(executor.now(), TimePoint(250ms));
    EXPECT_EQ(kind_of([&] { promise.future().wait(executor.deadline_in(-1s)); }), ErrorKind::kTimedOut);
    promise.set_value(3);
    EXPECT_EQ(promise.future().wait(0s), 3) << "a future completes after a wait that timed out";
  });
}

TEST(FutureWait, ReportsCompletionWithoutThrowingTheFailure) {
  for_seeds(20, [](SimExecutor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    const Future<int> future = promise.future();
    EXPECT_FALSE(future.wait_for(250ms));
    EXPECT_EQ(executor.now(), TimePoint(250ms));
    EXPECT_FALSE(future.wait_until(executor.deadline_in(-1s)));
    const Thread failing = executor.spawn("fails", [&] {
      executor.sleep(1s);
      promise.set_error(Error(ErrorKind::kTimedOut, "the work was late"));
    });
    EXPECT_TRUE(future.wait_for(1h));
    EXPECT_GE(executor.now(), TimePoint(1250ms));
    EXPECT_LT(executor.now(), TimePoint(1300ms));
    EXPECT_TRUE(future.wait_for(0s));
    EXPECT_EQ(kind_of([&] { future.wait(); }), ErrorKind::kTimedOut);
    EXPECT_TRUE(make_ready_future<int>(1).wait_for(0s)) << "it has no executor";
  });
}

TEST(FutureWait, WakesEveryWaiterInTime) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    std::atomic<int> got{0}, timed_out{0};
    std::vector<Thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.push_back(executor.spawn("waits", [&, i, future = promise.future()] {
        if (i % 4 == 3) {
          timed_out += kind_of([&] { future.wait(1ns); }) == ErrorKind::kTimedOut ? 1 : 0;
        } else {
          got += future.wait(1h);
        }
      }));
    }
    while (timed_out < 2) executor.yield();
    promise.set_value(1);
    threads.clear();
    EXPECT_EQ(got, 6);
    EXPECT_EQ(timed_out, 2);
  });
}

TEST(FutureWait, RefusesToWaitWhenTheExecutorIsGone) {
  const auto executor = make_executor();
  OwnedPool pool(*executor);
  Promise<int> promise(pool.continuations());
  pool.destroy();
  EXPECT_EQ(kind_of([&] { promise.future().wait(1h); }), ErrorKind::kCancelled);
  promise.set_value(4);
  EXPECT_EQ(promise.future().wait(1h), 4);
}

TEST(FutureThen, PassesValuesAlongAChain) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    Future<std::string> text = promise.future()
                                   .then([](const Future<int>& f) { return f.wait() * 2; })
                                   .then([](const Future<int>& f) { return std::to_string(f.wait()); });
    Future<void> end = text.then([](const Future<std::string>&) {});
    promise.set_value(21);
    EXPECT_EQ(text.wait(), "42");
    end.wait();
  });
}

TEST(FutureThen, PassesErrorsAlongAChainUntilACallbackHandlesThem) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    std::atomic<int> calls{0};
    Future<int> failed = promise.future().then([&](const Future<int>& f) {
      ++calls;
      return f.wait() + 1;
    });
    Future<int> handled = failed.then([&](const Future<int>& f) {
      ++calls;
      return f.error() ? -1 : f.wait();
    });
    promise.set_error(Error(ErrorKind::kDenied, "no entry"));
    EXPECT_EQ(handled.wait(), -1);
    EXPECT_EQ(failure_of(failed), ErrorKind::kDenied);
    EXPECT_EQ(calls, 2);
  });
}

TEST(FutureThen, FailsWithTheExceptionOfTheCallback) {
  everywhere(20, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<void> promise(pool.continuations());
    Future<int> result =
        promise.future().then([](const Future<void>&) -> int { throw std::range_error("r"); });
    promise.set_value();
    EXPECT_THROW(result.wait(), std::range_error);
  });
}

TEST(FutureThen, RunsEachOfManyCallbacksOnceWheneverItWasAdded) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 3});
    Promise<int> promise(pool.continuations());
    std::atomic<int> calls{0};
    std::vector<Future<void>> results;
    Thread thread = executor.spawn("sets", [&] {
      executor.yield();
      promise.set_value(1);
    });
    for (int i = 0; i < 20; ++i) {
      results.push_back(promise.future().then([&](const Future<int>& f) { calls += f.wait(); }));
      if (i % 5 == 0) executor.yield();
    }
    for (auto& result : results) result.wait();
    EXPECT_EQ(calls, 20);
  });
}

TEST(FutureThen, RunsOnAPoolThreadEvenWhenTheFutureIsComplete) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    promise.set_value(1);
    Future<bool> on_pool = promise.future().then([&](const Future<int>&) { return pool->is_pool_thread(); });
    EXPECT_TRUE(on_pool.wait());
  });
}

// The completing thread may hold a lock that the callback takes: in simulation, a callback that ran inside
// set_value would deadlock.
TEST(FutureThen, NeverRunsInsideSetValueNorUnderTheCompletersLock) {
  for_seeds(25, [](SimExecutor& executor) {
    OwnedPool pool(executor);
    Mutex mutex;
    Promise<int> value(pool.continuations()), failure(pool.continuations());
    auto dropped = std::make_unique<Promise<int>>(pool.continuations());
    bool completing = false;
    std::vector<Future<void>> results;
    for (const Future<int>& future : {value.future(), failure.future(), dropped->future()}) {
      results.push_back(future.then([&](const Future<int>&) {
        EXPECT_FALSE(completing);
        const bool free = mutex.try_lock();
        EXPECT_TRUE(free);
        if (free) mutex.unlock();
      }));
    }
    {
      MutexLock lock(mutex);
      completing = true;
      value.set_value(1);
      failure.set_error(Error(ErrorKind::kInvalid, "wrong"));
      dropped.reset();
      completing = false;
    }
    for (auto& result : results) result.wait();
  });
}

TEST(FutureThen, RunsOnTheCompletingThreadWhenTheExecutorIsGone) {
  const auto executor = make_executor();
  OwnedPool pool(*executor);
  Promise<int> promise(pool.continuations());
  const Future<int> before = promise.future().then([](const Future<int>& f) { return f.wait() + 1; });
  pool.destroy();
  std::thread::id ran_on;
  const Future<int> after = before.then([&](const Future<int>& f) {
    ran_on = std::this_thread::get_id();
    return f.wait() + 1;
  });
  promise.set_value(1);
  EXPECT_EQ(before.wait(), 2);
  EXPECT_EQ(after.wait(), 3);
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_EQ(after.then([](const Future<int>& f) { return f.wait() + 1; }).wait(), 4);
}

TEST(Future, CanBeCreatedReadyOrFailed) {
  EXPECT_EQ(make_ready_future<int>(3).wait(), 3);
  make_ready_future<void>().wait();
  const auto failed =
      make_failed_future<int>(std::make_exception_ptr(Error(ErrorKind::kDisconnected, "gone")));
  EXPECT_TRUE(failed.done());
  EXPECT_EQ(failure_of(failed), ErrorKind::kDisconnected);
  EXPECT_EQ(kind_of([&] { failed.wait(); }), ErrorKind::kDisconnected);
}

TEST(Future, SaysThatItIsEmptyInEveryUse) {
  const Future<int> empty;
  EXPECT_FALSE(empty.valid());
  const std::vector<std::function<void()>> uses{
      [&] { empty.wait(); },
      [&] { empty.wait(1s); },
      [&] { static_cast<void>(empty.wait_for(1s)); },
      [&] { empty.synchronize(); },
      [&] { static_cast<void>(empty.done()); },
      [&] { static_cast<void>(empty.error()); },
      [&] { static_cast<void>(empty.then([](const Future<int>&) {})); },
      [&] { empty.add_done_callback([](const Future<int>&) {}); },
      [&] {
        static_cast<void>(when_all(std::vector<Future<int>>{make_ready_future<int>(1), empty}));
      },
      [&] { wait_all(std::vector<Future<int>>{empty}); },
  };
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const Error error = torchspan::testing::error_of(uses[i]);
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << i;
    EXPECT_THAT(error.message(), HasSubstr("this Future is empty")) << i;
  }
}

// Random trees of futures: every value must be the sum that a plain computation gives.
TEST(Future, ComputesTheSameAsASequentialProgram) {
  for_seeds(50, [](SimExecutor& executor) {
    OwnedPool pool(executor, {.threads = 1 + executor.random() % 3});
    std::vector<Future<std::int64_t>> futures;
    std::vector<std::int64_t> expected;
    std::vector<Thread> threads;
    for (int i = 0; i < 30; ++i) {
      if (i < 3 || executor.random() % 3 == 0) {
        auto promise = std::make_shared<Promise<std::int64_t>>(pool.continuations());
        const auto value = static_cast<std::int64_t>(executor.random() % 1000);
        futures.push_back(promise->future());
        expected.push_back(value);
        threads.push_back(executor.spawn("sets", [&executor, promise, value] {
          executor.sleep(std::chrono::microseconds(executor.random() % 20));
          promise->set_value(value);
        }));
        continue;
      }
      const std::size_t left = executor.random() % futures.size(), right = executor.random() % futures.size();
      expected.push_back(expected[left] + expected[right]);
      futures.push_back(futures[left].then(
          [other = futures[right]](const Future<std::int64_t>& f) { return f.wait() + other.wait(); }));
    }
    for (std::size_t i = 0; i < futures.size(); ++i) EXPECT_EQ(futures[i].wait(), expected[i]);
  });
}

}  // namespace
}  // namespace torchspan::future_test
