#include "optim/distributed/step_queue.h"

#include <array>
#include <gtest/gtest.h>
#include <random>
#include <stdexcept>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/detail/core/pool.h>
#include <torchspan/optim/algorithms.h>

#include "core/api/sim_executor.h"

namespace torchspan::optim::step_queue_test {
namespace {

using std::chrono::milliseconds;

void simulate(std::uint64_t seed, std::size_t threads,
              const std::function<void(Executor&, const std::shared_ptr<Pool>&, StepQueue&)>& body) {
  SimExecutor executor(seed);
  executor.run([&] {
    auto pool = std::make_shared<Pool>(executor, PoolOptions{.name = "steps", .threads = threads});
    StepQueue queue(pool);
    body(executor, pool, queue);
    pool->stop();
  });
}

/// Records which job holds which key, and in which order.
class RunLog {
 public:
  void take(const std::vector<std::size_t>& keys, int job) {
    MutexLock lock(mutex_);
    for (const std::size_t key : keys) {
      EXPECT_FALSE(taken_[key]) << "two jobs hold key " << key;
      taken_[key] = true;
      order_[key].push_back(job);
    }
  }
  void give_back(const std::vector<std::size_t>& keys) {
    MutexLock lock(mutex_);
    for (const std::size_t key : keys) taken_[key] = false;
  }
  std::vector<int> order(std::size_t key) {
    MutexLock lock(mutex_);
    return order_[key];
  }

  static constexpr std::size_t kKeys = 5;

 private:
  Mutex mutex_;
  std::array<bool, kKeys> taken_ TORCHSPAN_GUARDED_BY(mutex_){};
  std::array<std::vector<int>, kKeys> order_ TORCHSPAN_GUARDED_BY(mutex_);
};

TEST(StepQueue, RunsJobsWithACommonKeyInOrder) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    simulate(seed, 4, [seed](Executor& executor, const std::shared_ptr<Pool>&, StepQueue& queue) {
      std::mt19937_64 random(seed);
      RunLog log;
      const std::array<char, RunLog::kKeys> parameters{};
      std::array<std::vector<int>, RunLog::kKeys> expected;
      std::vector<Future<Unit>> done;
      for (int job = 0; job < 40; ++job) {
        std::vector<std::size_t> keys;
        StepQueue::Keys addresses;
        for (std::size_t key = 0; key < RunLog::kKeys; ++key) {
          if (random() % 3 != 0) continue;
          keys.push_back(key);
          addresses.insert(&parameters[key]);
          expected[key].push_back(job);
        }
        done.push_back(queue.run(addresses, [&, keys, job, time = milliseconds(random() % 5)] {
          log.take(keys, job);
          executor.sleep(time);
          log.give_back(keys);
        }));
      }
      for (const auto& future : done) future.wait();
      for (std::size_t key = 0; key < RunLog::kKeys; ++key) EXPECT_EQ(log.order(key), expected[key]);
    });
  }
}

TEST(StepQueue, RunsJobsWithoutACommonKeyAtOnce) {
  simulate(1, 4, [](Executor& executor, const std::shared_ptr<Pool>&, StepQueue& queue) {
    const char a = 0, b = 0;
    const TimePoint began = executor.now();
    const auto work = [&] { executor.sleep(milliseconds(10)); };
    const auto first = queue.run({&a}, work), second = queue.run({&b}, work);
    first.wait();
    second.wait();
    EXPECT_LT(executor.now() - began, milliseconds(20));
  });
}

TEST(StepQueue, LosesNoUpdateOfEightTrainersOnRealThreads) {
  constexpr int kTrainers = 8, kSteps = 200;
  const auto executor = make_executor();
  auto pool = std::make_shared<Pool>(*executor, PoolOptions{.name = "steps", .threads = 4});
  {
    StepQueue queue(pool);
    const at::Tensor table = at::zeros({20'000}, at::kDouble).set_requires_grad(true);
    const at::Tensor ones = at::ones({20'000}, at::kDouble);
    std::vector<Thread> trainers;
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      trainers.push_back(executor->spawn("trainer", [&] {
        const std::shared_ptr<FunctionalOptimizer> own = SGD{.lr = 1}.build({table});
        std::vector<Future<Unit>> done;
        for (int step = 0; step < kSteps; ++step) {
          done.push_back(queue.run({table.unsafeGetTensorImpl()},
                                   [&ones, own] { own->step(std::vector<at::Tensor>{ones}); }));
        }
        for (const auto& future : done) future.wait();
      }));
    }
    trainers.clear();
    EXPECT_TRUE(table.equal(ones * (-kTrainers * kSteps)));
  }
  pool->stop();
}

TEST(StepQueue, HoldsNoThreadForJobsThatWait) {
  simulate(2, 2, [](Executor& executor, const std::shared_ptr<Pool>& pool, StepQueue& queue) {
    const char key = 0;
    std::vector<Future<Unit>> done;
    for (int job = 0; job < 10; ++job) {
      done.push_back(queue.run({&key}, [&] { executor.sleep(milliseconds(10)); }));
    }
    const TimePoint began = executor.now();
    auto promise = std::make_shared<Promise<void>>(pool);
    const Future<void> ran = promise->future();
    pool->post([promise] { promise->set_value(); });
    ran.wait();
    EXPECT_LT(executor.now() - began, milliseconds(10));
    for (const auto& future : done) future.wait();
  });
}

TEST(StepQueue, FreesTheKeysOfAFailedJobAndReportsToItsCaller) {
  simulate(3, 2, [](Executor&, const std::shared_ptr<Pool>&, StepQueue& queue) {
    const char key = 0;
    const auto failed = queue.run({&key}, [] { throw std::runtime_error("no step today"); });
    const auto next = queue.run({&key}, [] {});
    EXPECT_THROW(failed.wait(), std::runtime_error);
    next.wait();
  });
}

}  // namespace
}  // namespace torchspan::optim::step_queue_test
