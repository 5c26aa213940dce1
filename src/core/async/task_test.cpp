#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <torchspan/core/task.h>

#include "core/async/trials.h"
#include "tests/support/errors.h"

namespace torchspan::task_test {
namespace {

using namespace std::chrono_literals;
using torchspan::testing::kind_of;

Task<int> constant(int value) { co_return value; }

Task<int> add(Future<int> left, Future<int> right) { co_return co_await left + co_await right; }

Task<int> fibonacci(int n) {
  if (n < 2) co_return n;
  const int before = co_await fibonacci(n - 1);
  co_return before + co_await fibonacci(n - 2);
}

Task<void> fail(std::string why) {
  throw std::out_of_range(why);
  co_return;
}

Task<int> recover(Future<int> future) {
  try {
    co_await fail("inner");
  } catch (const std::out_of_range& error) {
    if (error.what() != std::string("inner")) co_return -1;
  }
  try {
    co_return co_await future;
  } catch (const Error& error) {
    co_return static_cast<int>(error.kind());
  }
}

TEST(Task, DoesNothingUntilItIsStarted) {
  bool ran = false;
  const auto make = [](bool& ran) -> Task<void> {
    ran = true;
    co_return;
  };
  { Task<void> dropped = make(ran); }
  Task<void> task = make(ran);
  EXPECT_FALSE(ran);
  start(std::move(task), {}).wait();
  EXPECT_TRUE(ran);
}

TEST(Task, ReturnsThroughNestedTasks) {
  EXPECT_EQ(start(fibonacci(15), {}).wait(), 610);
  EXPECT_EQ(kind_of([] { start(add({}, make_ready_future<int>(1)), {}).wait(); }), ErrorKind::kInvalid);
  EXPECT_THROW(start(fail("outer"), {}).wait(), std::out_of_range);
}

TEST(Task, AwaitsFuturesThatOtherThreadsComplete) {
  everywhere(50, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> left(pool.continuations()), right(pool.continuations());
    Future<int> sum = start(add(left.future(), right.future()), pool.continuations());
    Thread first = executor.spawn("left", [&] { left.set_value(40); });
    Thread second = executor.spawn("right", [&] { right.set_value(2); });
    EXPECT_EQ(sum.wait(), 42);
  });
}

TEST(Task, PassesErrorsOfTasksAndFuturesThroughTheAwait) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor);
    Promise<int> promise(pool.continuations());
    Future<int> recovered = start(recover(promise.future()), pool.continuations());
    Future<int> failed = start(add(promise.future(), make_ready_future<int>(1)), pool.continuations());
    promise.set_error(Error(ErrorKind::kDenied, "no entry"));
    EXPECT_EQ(recovered.wait(), static_cast<int>(ErrorKind::kDenied));
    EXPECT_THROW(failed.wait(), Error);
  });
}

TEST(Task, CompletesWhenTheAwaitedPromiseIsDropped) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor);
    auto promise = std::make_unique<Promise<int>>(pool.continuations());
    Future<int> recovered = start(recover(promise->future()), pool.continuations());
    promise.reset();
    EXPECT_EQ(recovered.wait(), static_cast<int>(ErrorKind::kCancelled));
  });
}

TEST(Task, HandsOverMoveOnlyResults) {
  const auto make = [](int value) -> Task<std::unique_ptr<int>> { co_return std::make_unique<int>(value); };
  const auto use = [](auto make) -> Task<int> {
    std::unique_ptr<int> first = co_await make(3);
    std::unique_ptr<int> second = co_await make(4);
    co_return *first** second;
  };
  EXPECT_EQ(start(use(make), {}).wait(), 12);
  EXPECT_TRUE(start(make(1), {}).done());
}

TEST(Task, RefusesToBeAwaitedTwice) {
  const auto twice = []() -> Task<int> {
    Task<int> task = constant(1);
    const int once = co_await task;
    co_return once + co_await task;
  };
  const auto moved_away = []() -> Task<int> {
    Task<int> task = constant(1);
    Task<int> other = std::move(task);
    co_return co_await task;  // NOLINT(bugprone-use-after-move): what is tested
  };
  EXPECT_THROW(start(twice(), {}).wait(), Error);
  EXPECT_THROW(start(moved_away(), {}).wait(), Error);
}

TEST(Task, UsesNoStackForAwaitsThatNeedNotWait) {
  const auto loop = [](int times) -> Task<std::int64_t> {
    std::int64_t sum = 0;
    for (int i = 0; i < times; ++i) sum += co_await constant(1) + co_await make_ready_future<int>(1);
    co_return sum;
  };
  // A stack has 8 MiB, and a turn could not leave less than two frames of 16 bytes there.
  EXPECT_EQ(start(loop(300'000), {}).wait(), 600'000);
}

TEST(Task, ReturnsThroughADeepNestWithoutUsingTheStack) {
  struct Deep {
    static Task<int> sum(int n) {
      if (n == 0) co_return 0;
      co_return 1 + co_await sum(n - 1);
    }
  };
  EXPECT_EQ(start(Deep::sum(20'000), {}).wait(), 20'000);
}

TEST(Task, ResumesOnThePoolOfTheAwaitedFuture) {
  everywhere(10, [](Executor& executor) {
    OwnedPool home(executor, {.name = "home"}), other(executor, {.name = "other"});
    Promise<int> promise(other.continuations());
    const auto where = [](Future<int> future, Pool& pool) -> Task<bool> {
      co_await future;
      co_return pool.is_pool_thread();
    };
    Future<bool> there = start(where(promise.future(), *other), home.continuations());
    promise.set_value(1);
    EXPECT_TRUE(there.wait());
  });
}

TEST(Task, DestroysItsLocalsAndArgumentsBeforeItsFutureCompletes) {
  everywhere(13, [](Executor& executor) {
    OwnedPool pool(executor);
    const auto token = std::make_shared<int>(1);
    const auto hold = [](std::shared_ptr<int> argument, Future<int> future) -> Task<int> {
      const auto local = argument;  // NOLINT(performance-unnecessary-copy-initialization): what is tested
      co_return co_await future + *local;
    };
    Promise<int> promise(pool.continuations());
    Future<int> result = start(hold(token, promise.future()), pool.continuations());
    promise.set_value(1);
    EXPECT_EQ(result.wait(), 2);
    EXPECT_EQ(token.use_count(), 1);
  });
}

/// Stands for thread-local state: one number per thread.
class ThreadState {
 public:
  int& here() {
    MutexLock lock(mutex_);
    return values_[std::this_thread::get_id()];
  }
  void expect_clean() {
    MutexLock lock(mutex_);
    for (const auto& [id, value] : values_) EXPECT_EQ(value, 0) << "state leaked into a thread";
  }

 private:
  Mutex mutex_;
  std::map<std::thread::id, int> values_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Carries a ThreadState for a coroutine, counts its steps, and pauses after each, so that a step that starts
/// too early is detected.
class Recorder final : public TaskEnvironment {
 public:
  Recorder(Executor& executor, ThreadState& state, int start)
      : executor_(executor), state_(state), saved_(start) {}

  void run(std::coroutine_handle<> step) override {
    EXPECT_FALSE(inside_.exchange(true)) << "two steps overlap";
    ++steps_;
    const int own = std::exchange(state_.here(), saved_);
    step.resume();
    executor_.yield();
    saved_ = std::exchange(state_.here(), own);
    EXPECT_TRUE(inside_.exchange(false));
  }
  bool inside() const { return inside_; }
  int steps() const { return steps_; }
  int saved() const { return saved_; }

 private:
  Executor& executor_;
  ThreadState& state_;
  int saved_;
  std::atomic<bool> inside_{false};
  std::atomic<int> steps_{0};
};

struct Witness {
  ThreadState& state;
  Recorder& recorder;
  int expected;

  /// Checks that the coroutine finds the state that it left, and changes the state for the next check.
  void look() {
    EXPECT_TRUE(recorder.inside());
    EXPECT_EQ(state.here(), expected);
    state.here() = ++expected;
  }
};
/// Checks the state on destruction: a coroutine frame is destroyed within its last step.
struct ChecksWhenDestroyed {
  Witness& witness;
  ~ChecksWhenDestroyed() { witness.look(); }
};

Task<int> inner_steps(Witness& witness, Future<int> future) {
  witness.look();
  const int value = co_await future;
  witness.look();
  co_return value;
}

Task<int> outer_steps(Witness& witness, std::vector<Future<int>> futures) {
  ChecksWhenDestroyed end{witness};
  int sum = 0;
  for (auto& future : futures) {
    witness.look();
    sum += co_await inner_steps(witness, future);
    witness.look();
    try {
      co_await fail("inside");
    } catch (const std::out_of_range&) {
      witness.look();
    }
  }
  co_return sum;
}

TEST(TaskEnvironment, SeesEachStepInsideRunAndTheStateFollowsTheCoroutine) {
  everywhere(75, [](Executor& executor) {
    ThreadState state;
    std::vector<std::shared_ptr<Recorder>> recorders;
    {
      OwnedPool pool(executor, {.threads = 2});
      std::vector<std::unique_ptr<Witness>> witnesses;
      std::vector<Promise<int>> promises;
      std::vector<Future<int>> futures, results;
      for (int i = 0; i < 4; ++i) promises.emplace_back(pool.continuations());
      for (auto& promise : promises) futures.push_back(promise.future());
      for (int i = 0; i < 3; ++i) {
        const int begin = 1000 * (i + 1);
        recorders.push_back(std::make_shared<Recorder>(executor, state, begin));
        witnesses.push_back(std::make_unique<Witness>(Witness{state, *recorders.back(), begin}));
        results.push_back(
            start(outer_steps(*witnesses.back(), futures), pool.continuations(), recorders.back()));
      }
      Thread one = executor.spawn("one", [&] {
        promises[0].set_value(1);
        promises[1].set_value(2);
      });
      Thread two = executor.spawn("two", [&] {
        promises[3].set_value(4);
        promises[2].set_value(3);
      });
      for (auto& result : results) EXPECT_EQ(result.wait(), 10);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(recorders[i]->saved(), witnesses[i]->expected);
    }
    for (const auto& recorder : recorders) {
      EXPECT_FALSE(recorder->inside());
      EXPECT_GE(recorder->steps(), 1);
      EXPECT_LE(recorder->steps(), 5) << "one at the start and one for each future that it had to wait for";
    }
    state.expect_clean();
  });
}

TEST(TaskEnvironment, HasLeftTheThreadWhenTheTasksFutureCompletes) {
  for_seeds(13, [](SimExecutor& executor) {
    ThreadState state;
    const auto recorder = std::make_shared<Recorder>(executor, state, 5);
    Witness witness{state, *recorder, 5};
    Promise<int> promise(std::weak_ptr<ContinuationExecutor>{});  // they run where it is completed
    Future<int> result = start(inner_steps(witness, promise.future()), {}, recorder);
    Future<void> after = result.then([&](const Future<int>&) {
      EXPECT_FALSE(recorder->inside());
      EXPECT_EQ(state.here(), 0);
    });
    promise.set_value(1);
    EXPECT_TRUE(after.done());
    EXPECT_EQ(after.error(), nullptr);
    EXPECT_EQ(recorder->steps(), 2);
    EXPECT_EQ(recorder->saved(), 7);
  });
}

}  // namespace
}  // namespace torchspan::task_test
