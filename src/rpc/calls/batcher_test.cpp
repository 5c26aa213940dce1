// Tests Batcher, Worker::delay() and Worker::barrier_async().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/task.h>
#include <torchspan/rpc/batcher.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::batcher_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ClusterOptions;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kind_of;
using testing::SimCluster;

/// Squares numbers in batches, and remembers the sizes of the batches.
struct Squares {
  explicit Squares(const Worker& worker,
                   BatcherOptions options = {.max_size = 4, .max_delay = milliseconds(5)})
      : batcher(
            worker,
            [this](const std::vector<std::int64_t>& numbers) {
              {
                MutexLock lock(mutex);
                sizes.push_back(numbers.size());
              }
              std::vector<std::int64_t> squares;
              for (const std::int64_t number : numbers) {
                if (number < 0) throw std::invalid_argument("a negative number");
                if (number != 99) squares.push_back(number * number);
              }
              return squares;
            },
            options) {}
  Mutex mutex;
  std::vector<std::size_t> sizes;
  Batcher<std::int64_t, std::int64_t> batcher;
};

Future<std::int64_t> square(const RRef<std::shared_ptr<Squares>>& squares, std::int64_t number) {
  return squares.local_value()->batcher.add(number);
}
std::shared_ptr<Squares> make_squares(Worker& worker) { return std::make_shared<Squares>(worker); }
std::vector<std::int64_t> sizes_of(const RRef<std::shared_ptr<Squares>>& squares) {
  const auto held = squares.local_value();
  MutexLock lock(held->mutex);
  return {held->sizes.begin(), held->sizes.end()};
}
constexpr Function<square> kSquare{"square"};
constexpr Function<make_squares> kMakeSquares{"make_squares"};
constexpr Function<sizes_of> kSizesOf{"sizes_of"};

Task<std::int64_t> answer_late(Worker& worker, std::int64_t value) {
  co_await worker.delay(milliseconds(250));
  co_return value;
}
constexpr Function<answer_late> kAnswerLate{"answer_late"};

void on_first(const std::function<void(SimCluster&, Worker&)>& body) {
  ClusterOptions options;
  options.functions.add(kSquare, kMakeSquares, kSizesOf, kAnswerLate);
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(world, worker);
  });
}

std::vector<Future<std::int64_t>> ask(Worker& worker, const RRef<std::shared_ptr<Squares>>& squares,
                                      std::int64_t count) {
  std::vector<Future<std::int64_t>> answers;
  for (std::int64_t i = 0; i < count; ++i) answers.push_back(worker.rpc_async(1, kSquare, squares, i));
  return answers;
}

TEST(Batcher, ServesSingleCallsInFullBatchesAndTheRestAfterTheDelay) {
  on_first([](SimCluster& world, Worker& worker) {
    const auto squares = worker.remote(1, kMakeSquares);
    const TimePoint start = world.executor().now();
    auto answers = ask(worker, squares, 10);
    for (std::int64_t i = 0; i < 10; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].wait(), i * i);
    EXPECT_GE(world.executor().now() - start, milliseconds(5)) << "the last two wait for others";
    EXPECT_LE(world.executor().now() - start, milliseconds(50));
    std::int64_t served = 0;
    for (const std::int64_t size : worker.rpc_sync(1, kSizesOf, squares)) {
      EXPECT_LE(size, 4);
      served += size;
    }
    EXPECT_EQ(served, 10);
  });
}

TEST(Batcher, FailsAllCallsOfABatchThatThrowsAndNoOthers) {
  on_first([](SimCluster&, Worker& worker) {
    Squares squares(worker);
    auto good = squares.batcher.add(2), bad = squares.batcher.add(-1);
    EXPECT_THROW(good.wait(), std::invalid_argument);
    EXPECT_THROW(bad.wait(), std::invalid_argument);
    EXPECT_EQ(squares.batcher.add(3).wait(), 9);
    auto missing = squares.batcher.add(99);
    try {
      missing.wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("returned 0 replies for 1 requests"));
    }
    EXPECT_THAT(squares.sizes, ElementsAre(2, 1, 1));
  });
}

TEST(Batcher, FailsRequestsThatAreNotServedWhenItIsDestroyed) {
  on_first([](SimCluster&, Worker& worker) {
    Future<std::int64_t> left;
    {
      Squares squares(worker, {.max_size = 4, .max_delay = seconds(10)});
      left = squares.batcher.add(2);
    }
    EXPECT_EQ(kind_of([&] { left.wait(); }), ErrorKind::kCancelled);
    EXPECT_EQ(kind_of([&] { Squares(worker, {.max_size = 0}); }), ErrorKind::kInvalid);
  });
}

TEST(Batcher, RefusesRequestsWhenTooManyWait) {
  on_first([](SimCluster&, Worker& worker) {
    const BatcherOptions options{.max_size = 4, .max_delay = seconds(10), .max_waiting = 5};
    Batcher<std::int64_t, std::int64_t>* filled = nullptr;
    std::vector<Future<std::int64_t>> answers, later;
    Batcher<std::int64_t, std::int64_t> batcher(
        worker,
        [&](const std::vector<std::int64_t>& numbers) {
          for (int i = 0; i < 7 && later.size() < 7; ++i) later.push_back(filled->add(10 + i));
          return numbers;
        },
        options);
    filled = &batcher;
    for (int i = 0; i < 4; ++i) answers.push_back(batcher.add(i));
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(answers[i].wait(), static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(later[i].wait(), static_cast<std::int64_t>(10 + i));
    for (std::size_t i = 5; i < 7; ++i) EXPECT_EQ(kind_of([&] { later[i].wait(); }), ErrorKind::kOverloaded);
    EXPECT_EQ(kind_of([&] { Squares(worker, {.max_size = 4, .max_waiting = 3}); }), ErrorKind::kInvalid);
  });
}

/// One timer, however many requests come and are served before it.
TEST(Batcher, ServesTheRestAfterItsOwnDelayAlsoWhenAnEarlierTimerRuns) {
  on_first([](SimCluster& world, Worker& worker) {
    Squares squares(worker, {.max_size = 2, .max_delay = seconds(10)});
    auto first = squares.batcher.add(1), second = squares.batcher.add(2);
    EXPECT_EQ(first.wait() + second.wait(), 5);
    worker.delay(seconds(6)).wait();
    const TimePoint start = world.executor().now();
    EXPECT_EQ(squares.batcher.add(3).wait(), 9);
    EXPECT_GE(world.executor().now() - start, seconds(10));
    EXPECT_LE(world.executor().now() - start, seconds(11));
    EXPECT_THAT(squares.sizes, ElementsAre(2, 1));
  });
}

TEST(Batcher, IsNotDestroyedWhileABatchIsServed) {
  on_first([](SimCluster& world, Worker& worker) {
    bool served = false;
    Future<std::int64_t> answer;
    const TimePoint start = world.executor().now();
    {
      Batcher<std::int64_t, std::int64_t> batcher(worker,
                                                  [&](const std::vector<std::int64_t>& numbers) {
                                                    worker.delay(seconds(2)).wait();
                                                    served = true;
                                                    return numbers;
                                                  },
                                                  {.max_size = 1});
      answer = batcher.add(3);
      worker.delay(seconds(1)).wait();
    }
    EXPECT_TRUE(served);
    EXPECT_EQ(answer.wait(), 3);
    EXPECT_LE(world.executor().now() - start, seconds(3));
    auto own = std::make_unique<std::unique_ptr<Batcher<std::int64_t, std::int64_t>>>();
    *own = std::make_unique<Batcher<std::int64_t, std::int64_t>>(
        worker,
        [&own](const std::vector<std::int64_t>& numbers) {
          own->reset();  // does not wait for itself
          return numbers;
        },
        BatcherOptions{.max_size = 1});
    EXPECT_EQ((*own)->add(4).wait(), 4);
  });
}

TEST(Batcher, FailsWhatWaitsWhenTheWorkerStops) {
  ClusterOptions options;
  options.graceful = false;
  SimCluster world(std::move(options));
  std::unique_ptr<Squares> squares;
  std::vector<Future<std::int64_t>> waiting;
  world.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    squares =
        std::make_unique<Squares>(worker, BatcherOptions{.max_size = 4, .max_delay = std::chrono::hours(1)});
    for (std::int64_t i = 0; i < 3; ++i) waiting.push_back(squares->batcher.add(i));
  });
  for (std::int64_t i = 0; i < 6; ++i)
    waiting.push_back(squares->batcher.add(i));  // alone, and in a full batch
  for (const auto& each : waiting) {
    ASSERT_TRUE(each.done());
    EXPECT_EQ(kind_of([&] { each.wait(); }), ErrorKind::kCancelled);
  }
}

TEST(Delay, CompletesAfterTheTimeWithoutAThread) {
  on_first([](SimCluster& world, Worker& worker) {
    const TimePoint start = world.executor().now();
    std::vector<Future<std::int64_t>> answers;  // more than the worker has threads
    for (std::int64_t i = 0; i < 100; ++i) answers.push_back(worker.rpc_async(1, kAnswerLate, i));
    for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].wait(), i);
    EXPECT_GE(world.executor().now() - start, milliseconds(250));
    EXPECT_LE(world.executor().now() - start, milliseconds(300));
    worker.delay(milliseconds(-1)).wait();
  });
}

TEST(Delay, FailsWhenTheWorkerStops) {
  ClusterOptions options;
  options.graceful = false;
  SimCluster world(std::move(options));
  Future<void> late;
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) late = worker.delay(std::chrono::hours(1));
  });
  ASSERT_TRUE(late.done());
  EXPECT_EQ(kind_of([&] { late.wait(); }), ErrorKind::kCancelled);
}

TEST(BarrierAsync, MeetsTheBarrierOfOthersAndFailsAtItsTimeout) {
  ClusterOptions options;
  options.workers = 3;
  SimCluster world(std::move(options));
  std::atomic<int> entered{0};
  world.run([&](Worker& worker) {
    worker.delay(milliseconds(10 * worker.rank())).wait();
    ++entered;
    if (worker.rank() == 1) {
      worker.barrier();
    } else {
      const Future<void> all = worker.barrier_async();
      EXPECT_FALSE(worker.rank() == 0 && all.done());
      all.wait();
    }
    EXPECT_EQ(entered.load(), 3);
    if (worker.rank() != 0) return;
    const Future<void> alone = worker.barrier_async({"worker0", "worker1"}, seconds(1));
    EXPECT_EQ(kind_of([&] { alone.wait(); }), ErrorKind::kTimedOut);
    EXPECT_EQ(kind_of([&] { worker.barrier_async({"nobody"}).wait(); }), ErrorKind::kInvalid);
  });
}

}  // namespace
}  // namespace torchspan::batcher_test
