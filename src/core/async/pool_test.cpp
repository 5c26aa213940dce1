#include <algorithm>
#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>

#include <torchspan/detail/core/pool.h>

#include "core/async/trials.h"
#include "tests/support/errors.h"

namespace torchspan::pool_test {
namespace {

using namespace std::chrono_literals;
using torchspan::testing::kind_of;

/// Whether `body` throws an Error of kind kOverloaded; `body` may also return normally.
template <class Body>
bool is_overload(Body body) {
  try {
    body();
    return false;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kOverloaded) << error.what();
    return true;
  }
}

/// Runs `body` on the pool and returns the future of its result.
template <class F>
auto async(const std::shared_ptr<Pool>& pool, F body) {
  using R = std::invoke_result_t<F&>;
  Promise<R> promise(pool);
  Future<R> future = promise.future();
  pool->post([promise = std::move(promise), body = std::move(body)]() mutable { promise.set_from(body); });
  return future;
}

/// Each level waits, holding its thread, for the level below it.
int nest(const std::shared_ptr<Pool>& pool, int depth) {
  if (depth == 0) return 0;
  return 1 + async(pool, [pool, depth] { return nest(pool, depth - 1); }).wait();
}

TEST(Pool, RejectsInvalidThreadCounts) {
  const auto executor = make_executor();
  EXPECT_EQ(kind_of([&] { Pool(*executor, {.threads = 0}); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { Pool(*executor, {.threads = 3, .max_threads = 2}); }), ErrorKind::kInvalid);
}

TEST(Pool, RunsEveryJobOnceOnItsOwnThreads) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 3});
    std::vector<std::atomic<int>> runs(60);
    std::vector<Thread> posters;
    for (int poster = 0; poster < 3; ++poster) {
      posters.push_back(executor.spawn("posts", [&, poster] {
        for (int i = poster * 20; i < poster * 20 + 20; ++i) {
          pool->post([&, i] {
            EXPECT_TRUE(pool->is_pool_thread());
            ++runs[i];
          });
        }
      }));
    }
    posters.clear();
    pool->stop();
    EXPECT_FALSE(pool->is_pool_thread());
    EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](const auto& count) { return count == 1; }));
    EXPECT_EQ(pool->queued(), 0u);
    EXPECT_EQ(pool->thread_count(), 0u);
  });
}

TEST(Pool, StartsNoThreadBeforeThereIsWork) {
  const auto executor = make_executor();
  OwnedPool pool(*executor, {.threads = 4});
  EXPECT_EQ(pool->thread_count(), 0u);
  async(pool.continuations(), [] {}).wait();
  EXPECT_EQ(pool->thread_count(), 1u);
}

TEST(Pool, RunsNoMoreJobsAtOnceThanItHasThreads) {
  for_seeds(25, [](SimExecutor& executor) {
    const std::size_t threads = 1 + executor.random() % 3;
    OwnedPool pool(executor, {.threads = threads});
    std::size_t running = 0, most = 0;
    for (int i = 0; i < 20; ++i) {
      pool->post([&] {
        most = std::max(most, ++running);
        for (int turn = 0; turn < 3; ++turn) executor.yield();
        --running;
      });
    }
    pool->stop();
    EXPECT_EQ(most, threads);
  });
}

TEST(Pool, StartsNoJobWhileThreadsThatReturnFromAWaitKeepItBusy) {
  for_seeds(25, [](SimExecutor& executor) {
    const std::size_t threads = 1 + executor.random() % 3;
    OwnedPool pool(executor, {.threads = threads});
    Promise<void> promise(pool.continuations());
    std::size_t running = 0;
    for (int i = 0; i < 30; ++i) {
      pool->post([&, i] {
        EXPECT_LE(++running, threads);
        if (i == 12) promise.set_value();
        if (i < 10) {
          --running;
          promise.future().wait();
          ++running;
        }
        for (std::uint64_t turns = executor.random() % 4; turns > 0; --turns) executor.yield();
        --running;
      });
    }
    pool->stop();
  });
}

TEST(Pool, RunsJobsInTheOrderOfPostingOnOneThread) {
  everywhere(10, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1});
    std::vector<int> order;
    for (int i = 0; i < 10; ++i) pool->post([&, i] { order.push_back(i); });
    pool->stop();
    std::vector<int> expected(10);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(order, expected);
  });
}

// peer: rpc/more nested calls never starve
TEST(PoolGrowth, CompletesANestOfFiftyWaitsWithOneThread) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1});
    EXPECT_EQ(async(pool.continuations(), [&] { return nest(pool.continuations(), 50); }).wait(), 50);
    EXPECT_LE(pool->thread_count(), 51u);
  });
}

TEST(PoolGrowth, ReplacesAThreadThatIsInABlockingScope) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1});
    const auto parker = executor.make_parker();
    Future<bool> blocked = async(pool.continuations(), [&] {
      Pool::BlockingScope outer(*pool);
      Pool::BlockingScope inner(*pool);
      return parker->park(executor.deadline_in(1h));
    });
    Future<void> other = async(pool.continuations(), [&] { parker->unpark(); });
    other.wait();
    EXPECT_TRUE(blocked.wait());
  });
}

TEST(PoolGrowth, CountsAThreadOnceHoweverItsScopesNest) {
  for_seeds(25, [](SimExecutor& executor) {
    OwnedPool pool(executor, {.threads = 1});
    Promise<void> promise(pool.continuations());
    int running = 0;
    for (int i = 0; i < 4; ++i) {
      pool->post([&] {
        Pool::BlockingScope outer(*pool);
        promise.future().wait();
      });
    }
    for (int i = 0; i < 4; ++i) {
      pool->post([&] {
        EXPECT_EQ(++running, 1);
        executor.yield();
        --running;
        if (pool->queued() == 0) promise.set_value();
      });
    }
    pool->stop();
  });
}

TEST(PoolGrowth, IgnoresScopesAndWaitsOfOtherThreads) {
  everywhere(20, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1, .max_threads = 1});
    Pool::BlockingScope scope(*pool);
    Promise<int> promise(pool.continuations());
    pool->post([&] { promise.set_value(1); });
    EXPECT_EQ(promise.future().wait(), 1);
  });
}

// peer: rpc/more nested calls never starve
TEST(PoolCap, ReportsOverloadToTheDeepestNestedWaitInsteadOfHanging) {
  everywhere(25, [](Executor& executor) {
    std::atomic<bool> overloaded{false};
    std::function<void()> nest_for_ever;
    OwnedPool pool(executor, {.threads = 2, .max_threads = 8});
    nest_for_ever = [&] {
      if (overloaded) return;  // the job of a wait that failed
      try {
        async(pool.continuations(), nest_for_ever).wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
        overloaded = true;
        throw;
      }
    };
    EXPECT_EQ(kind_of([&] { async(pool.continuations(), nest_for_ever).wait(); }), ErrorKind::kOverloaded);
    while (pool->queued() > 0) executor.yield();
    EXPECT_EQ(async(pool.continuations(), [&] { return nest(pool.continuations(), 5); }).wait(), 5)
        << "the pool works on";
    EXPECT_LE(pool->thread_count(), 8u);
  });
}

TEST(PoolCap, ReportsOverloadToAWaitThatBeganBeforeTheJobsWerePosted) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1, .max_threads = 2});
    Promise<int> never(pool.continuations());
    std::atomic<int> waiting{0};
    std::vector<Future<bool>> waits;
    for (int i = 0; i < 2; ++i) {
      waits.push_back(async(pool.continuations(), [&] {
        ++waiting;
        return is_overload([&] { never.future().wait(); });
      }));
    }
    while (waiting < 2) executor.yield();
    Future<int> job = async(pool.continuations(), [] { return 7; });
    EXPECT_EQ(job.wait(), 7);
    never.set_value(1);
    const bool first = waits[0].wait(), second = waits[1].wait();
    EXPECT_NE(first, second);
  });
}

// The last thread may wait although jobs are queued, if another thread has been woken and has not run yet.
TEST(PoolCap, LetsAThreadWaitWhenAnotherIsAboutToBecomeFree) {
  for_seeds(50, [](SimExecutor& executor) {
    OwnedPool pool(executor, {.threads = 1, .max_threads = 2});
    Promise<int> promise(pool.continuations());
    Future<int> first = async(pool.continuations(), [&] { return promise.future().wait(); });
    Future<int> second = async(pool.continuations(), [&] {
      promise.set_value(3);
      return async(pool.continuations(), [] { return 7; }).wait();
    });
    EXPECT_EQ(first.wait(), 3);
    EXPECT_EQ(second.wait(), 7);
  });
}

TEST(PoolCap, AnExtraThreadServesAWaitThatMustNotFail) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1, .max_threads = 1});
    const auto nested = [&pool] { return async(pool.continuations(), [] { return 7; }).wait(); };
    EXPECT_EQ(kind_of([&] { async(pool.continuations(), nested).wait(); }), ErrorKind::kOverloaded);
    const Future<int> allowed = async(pool.continuations(), [&] {
      const Pool::ExtraThread extra(*pool);
      return nested();
    });
    EXPECT_EQ(allowed.wait(), 7);
  });
}

TEST(PoolStop, RunsWhatIsQueuedFirst) {
  everywhere(25, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 2});
    std::atomic<int> runs{0};
    for (int i = 0; i < 50; ++i) {
      pool->post([&] {
        if (++runs % 7 == 0) executor.yield();
      });
    }
    pool->stop();
    EXPECT_EQ(runs, 50);
  });
}

TEST(PoolStop, StillReplacesThreadsThatBlock) {
  everywhere(50, [](Executor& executor) {
    OwnedPool pool(executor, {.threads = 1});
    Promise<int> promise(pool.continuations());
    std::atomic<int> got{0};
    for (int i = 0; i < 3; ++i) {
      pool->post([&] {
        executor.yield();
        got += promise.future().wait();
      });
    }
    pool->post([&] { promise.set_value(1); });
    pool->stop();
    EXPECT_EQ(got, 3);
    EXPECT_EQ(pool->thread_count(), 0u);
  });
}

TEST(PoolStop, RunsLaterPostsOnTheirPosters) {
  everywhere(20, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    Future<int> doubled = promise.future().then([](const Future<int>& f) { return 2 * f.wait(); });
    pool->stop();
    pool->stop();
    std::thread::id ran_on;
    pool->post([&] { ran_on = std::this_thread::get_id(); });
    EXPECT_EQ(ran_on, std::this_thread::get_id());
    promise.set_value(4);
    EXPECT_EQ(doubled.wait(), 8);
  });
}

TEST(PoolStop, RefusesOnAThreadOfThePoolItself) {
  everywhere(20, [](Executor& executor) {
    OwnedPool pool(executor);
    EXPECT_EQ(async(pool.continuations(), [&] { return kind_of([&] { pool->stop(); }); }).wait(),
              ErrorKind::kInvalid);
    EXPECT_TRUE(async(pool.continuations(), [&] { return pool->is_pool_thread(); }).wait())
        << "it was not stopped";
  });
}

TEST(PoolIdle, EndsThreadsBeyondItsSizeAfterAWhileAndGrowsAgain) {
  for_seeds(13, [](SimExecutor& executor) {
    OwnedPool pool(executor, {.threads = 2, .linger = 3s});
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(async(pool.continuations(), [&] { return nest(pool.continuations(), 20); }).wait(), 20);
      EXPECT_GE(pool->thread_count(), 20u);
      executor.sleep(2s);
      EXPECT_GE(pool->thread_count(), 20u);
      executor.sleep(2s);
      EXPECT_EQ(pool->thread_count(), 2u);
    }
  });
}

TEST(PoolIdle, LosesNoJobPostedWhileAThreadEnds) {
  for_seeds(50, [](SimExecutor& executor) {
    OwnedPool pool(executor, {.threads = 1, .linger = 1ms});
    int runs = 0;
    for (int round = 0; round < 5; ++round) {
      async(pool.continuations(), [&] { return nest(pool.continuations(), 4); }).wait();
      executor.sleep(1ms);
      for (int i = 0; i < 3; ++i) static_cast<void>(async(pool.continuations(), [&] { ++runs; }));
      executor.yield();
    }
    pool->stop();
    EXPECT_EQ(runs, 15);
  });
}

/// Refuses to start more than a given number of threads, as a system at its limit does.
class FewThreads final : public Executor {
 public:
  FewThreads(Executor& real, int left) : real_(real), left_(left) {}
  TimePoint now() const override { return real_.now(); }
  std::unique_ptr<Parker> make_parker() override { return real_.make_parker(); }
  std::unique_ptr<Poller> make_poller() override { return real_.make_poller(); }
  Thread spawn(std::string name, std::function<void()> body) override {
    if (left_-- <= 0) throw Error(ErrorKind::kOverloaded, "no thread left");
    return real_.spawn(std::move(name), std::move(body));
  }
  void yield() override { real_.yield(); }
  Duration spin_limit() const override { return real_.spin_limit(); }

 private:
  Executor& real_;
  std::atomic<int> left_;
};

TEST(PoolWithoutThreads, RunsJobsOnTheirPosters) {
  everywhere(20, [](Executor& executor) {
    FewThreads none(executor, 0);
    OwnedPool pool(none);
    std::thread::id ran_on;
    pool->post([&] { ran_on = std::this_thread::get_id(); });
    EXPECT_EQ(ran_on, std::this_thread::get_id());
    Promise<int> promise(pool.continuations());
    promise.set_value(1);
    EXPECT_EQ(promise.future().then([](const Future<int>& f) { return f.wait(); }).wait(), 1);
  });
}

TEST(PoolWithoutThreads, UsesItsExistingThreadsAndReportsOverloadWhenTheyAllWait) {
  everywhere(13, [](Executor& executor) {
    FewThreads few(executor, 3);
    OwnedPool pool(few, {.threads = 4});
    std::atomic<int> runs{0};
    for (int i = 0; i < 20; ++i) pool->post([&] { ++runs; });
    EXPECT_EQ(async(pool.continuations(), [&] { return nest(pool.continuations(), 2); }).wait(), 2);
    EXPECT_EQ(
        kind_of([&] { async(pool.continuations(), [&] { return nest(pool.continuations(), 9); }).wait(); }),
        ErrorKind::kOverloaded);
    pool->stop();
    EXPECT_EQ(runs, 20);
  });
}

/// A job that does random things which a pool must survive: nested waits, scopes, posts, continuations.
int run_random_nest(SimExecutor& executor, const std::shared_ptr<Pool>& pool, int depth) {
  if (depth == 0) return 1;
  const auto below = [&executor, pool, depth] { return run_random_nest(executor, pool, depth - 1); };
  switch (executor.random() % 5) {
    case 0:
      return async(pool, below).wait();
    case 1:
      return async(pool, below).then([](const Future<int>& f) { return f.wait(); }).wait();
    case 2: {
      Pool::BlockingScope scope(*pool);
      executor.sleep(std::chrono::microseconds(executor.random() % 30));
      return below();
    }
    case 3: {
      const Future<int> left = async(pool, below), right = async(pool, below);
      return left.wait() + right.wait();
    }
    default:
      executor.yield();
      return below();
  }
}

TEST(Pool, SurvivesRandomNestsOfWaitsScopesAndContinuations) {
  for_seeds(75, [](SimExecutor& executor) {
    const std::size_t threads = 1 + executor.random() % 3;
    OwnedPool pool(executor, {.threads = threads, .max_threads = 4096, .linger = 10us});
    std::vector<Future<int>> results;
    for (int i = 0; i < 3; ++i) {
      results.push_back(
          async(pool.continuations(), [&] { return run_random_nest(executor, pool.continuations(), 4); }));
    }
    for (auto& result : results) EXPECT_GE(result.wait(), 1);
  });
}

TEST(Pool, EndsEveryRandomNestWithAValueOrOverloadUnderASmallCap) {
  int overloaded = 0;
  for_seeds(75, [&](SimExecutor& executor) {
    const std::size_t threads = 1 + executor.random() % 2;
    OwnedPool pool(executor,
                   {.threads = threads, .max_threads = threads + executor.random() % 3, .linger = 10us});
    std::vector<Future<int>> results;
    for (int i = 0; i < 3; ++i) {
      results.push_back(
          async(pool.continuations(), [&] { return run_random_nest(executor, pool.continuations(), 3); }));
    }
    for (auto& result : results) {
      overloaded += is_overload([&] { result.wait(); }) ? 1 : 0;
    }
  });
  EXPECT_GT(overloaded, 0);
}

}  // namespace
}  // namespace torchspan::pool_test
