#include "core/api/listed_wait.h"

#include <gtest/gtest.h>

#include <torchspan/core/future.h>

#include "core/api/sim_executor.h"

namespace torchspan::listed_wait_test {
namespace {

using namespace std::chrono_literals;

/// Waits by wait_listed(), as the executors of workers and groups do.
class ListingExecutor final : public ContinuationExecutor {
 public:
  ListingExecutor(Executor& executor, SpanRecorder& spans) : executor_(executor), spans_(spans) {}
  Executor& executor() override { return executor_; }
  void post(UniqueFunction<void()> job) override { job(); }
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override {
    wait_listed(spans_, done, deadline, [&](Deadline until) {
      while (!done && parker.park(until)) {
      }
    });
  }

 private:
  Executor& executor_;
  SpanRecorder& spans_;
};

class ListedWaits : public ::testing::Test {
 protected:
  /// Waits for a future that is set `after` the start, and returns what is listed at each of `looks`.
  std::vector<std::vector<OpenOperation>> listed_at(Duration after, const std::vector<Duration>& looks,
                                                    Duration limit = 1h) {
    std::vector<std::vector<OpenOperation>> seen;
    executor_.run([&] {
      const TimePoint began = executor_.now();
      Promise<int> promise(continuations_);
      for (const Duration look : looks) executor_.at(began + look, [&] { seen.push_back(spans_.open()); });
      Thread setter = executor_.spawn("sets", [&] {
        executor_.sleep(after);
        promise.set_value(7);
      });
      try {
        EXPECT_EQ(promise.future().wait(limit), 7);
        EXPECT_EQ(executor_.now() - began, after);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
        EXPECT_EQ(executor_.now() - began, limit);
      }
    });
    return seen;
  }

  SimExecutor executor_{3};
  SpanRecorder spans_{executor_};
  std::shared_ptr<ListingExecutor> continuations_ = std::make_shared<ListingExecutor>(executor_, spans_);
};

TEST_F(ListedWaits, AreListedFromTwoTenthsOfASecondOn) {
  const auto seen = listed_at(3s, {100ms, 300ms, 2900ms, 3100ms});
  EXPECT_TRUE(seen.at(0).empty());
  for (const std::size_t look : {1, 2}) {
    ASSERT_EQ(seen.at(look).size(), 1u);
    EXPECT_EQ(seen[look][0].kind, SpanKind::kWait);
    EXPECT_EQ(seen[look][0].name, kFutureWait);
  }
  EXPECT_EQ(spans_.recorded(), 1u);
}

TEST_F(ListedWaits, LeaveNoTraceIfTheyAreShort) {
  EXPECT_TRUE(listed_at(199ms, {198ms}).at(0).empty());
  EXPECT_EQ(spans_.recorded(), 0u);
}

TEST_F(ListedWaits, EndAtTheirDeadline) {
  EXPECT_TRUE(listed_at(5s, {90ms}, 100ms).at(0).empty());
  EXPECT_EQ(spans_.recorded(), 0u);
  EXPECT_EQ(listed_at(5s, {900ms}, 1s).at(0).size(), 1u);
  EXPECT_EQ(spans_.recorded(), 1u);
}

}  // namespace
}  // namespace torchspan::listed_wait_test
