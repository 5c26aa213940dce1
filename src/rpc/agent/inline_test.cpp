#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"

namespace torchspan::inline_test {
namespace {

using std::chrono::milliseconds;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;

std::int64_t next(std::int64_t n) { return n + 1; }
std::int64_t next_of_next(Worker& worker, std::int64_t n);
Task<std::int64_t> next_later(Worker& worker, std::int64_t n);
void nap(Worker& worker, std::int64_t ms) { worker.runtime().executor.sleep(milliseconds(ms)); }
void nap_on_pool(Worker& worker, std::int64_t ms) { nap(worker, ms); }
void fail() { throw std::runtime_error("on purpose"); }

/// Adds a continuation that waits, on a thread of the pool, while this handler still runs.
std::int64_t let_another_wait(Worker& worker) {
  auto begin = worker.make_promise<void>();
  auto end = worker.make_promise<std::int64_t>();
  const auto result =
      begin.future().then([wanted = end.future()](const Future<void>&) { return wanted.wait(); });
  begin.set_value();
  nap(worker, 10);
  end.set_value(42);
  nap(worker, 10);
  return result.wait();  // complete by now
}

constexpr Function<next> kNext{"next", kInline};
constexpr Function<let_another_wait> kLetAnotherWait{"let_another_wait", kInline};
constexpr Function<next_of_next> kNextOfNext{"next_of_next", kInline};
constexpr Function<next_later> kNextLater{"next_later", kInline};
constexpr Function<nap> kNap{"nap", kInline};
constexpr Function<nap_on_pool> kNapOnPool{"nap_on_pool"};
constexpr Function<fail> kFail{"fail", kInline};

std::int64_t next_of_next(Worker& worker, std::int64_t n) { return worker.rpc_sync(0, kNext, n + 1); }
Task<std::int64_t> next_later(Worker& worker, std::int64_t n) {
  co_return co_await worker.rpc_async(0, kNext, n + 1);
}

void on_first(ClusterOptions options, const std::function<void(Worker&)>& body) {
  options.functions.add(kNext, kNextOfNext, kNextLater, kLetAnotherWait, kNap, kNapOnPool, kFail);
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

TEST(Inline, ServesWhileEveryPoolThreadIsBusy) {
  on_first({.threads = 1}, [](Worker& worker) {
    auto busy = worker.rpc_async(1, kNapOnPool, 1000);
    worker.runtime().executor.sleep(milliseconds(10));
    const TimePoint before = worker.runtime().executor.now();
    EXPECT_EQ(worker.rpc_sync(1, kNext, 41), 42);
    EXPECT_LT(worker.runtime().executor.now() - before, milliseconds(5));
    busy.wait();
    EXPECT_EQ(worker.rpc_sync(0, kNext, 41), 42) << "to itself too";
  });
}

TEST(Inline, ReportsFailuresLikeOthers) {
  on_first({}, [](Worker& worker) {
    try {
      worker.rpc_sync(1, kFail);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_THAT(error.what(), HasSubstr("on purpose"));
    }
  });
}

TEST(Inline, MustNotWaitButMayAwait) {
  on_first({}, [](Worker& worker) {
    try {
      worker.rpc_sync(1, kNextOfNext, 1);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_THAT(error.what(), HasSubstr("declared kInline"));
    }
    EXPECT_EQ(worker.rpc_sync(1, kNextLater, 1), 3);
  });
}

TEST(Inline, LetsContinuationsWaitOnThePool) {
  on_first({}, [](Worker& worker) { EXPECT_EQ(worker.rpc_sync(1, kLetAnotherWait), 42); });
}

TEST(Inline, MovesToThePoolWhenItIsNotShort) {
  on_first({}, [](Worker& worker) {
    for (int i = 0; i < 3; ++i) worker.rpc_sync(1, kNap, 100);
    auto nap = worker.rpc_async(1, kNap, 1000);
    worker.runtime().executor.sleep(milliseconds(10));
    const TimePoint before = worker.runtime().executor.now();
    EXPECT_EQ(worker.rpc_sync(1, kNext, 41), 42) << "the nap runs on the pool and does not block other calls";
    EXPECT_LT(worker.runtime().executor.now() - before, milliseconds(5));
    nap.wait();
  });
}

TEST(Inline, StaysInlineWhenItIsLongNowAndThen) {
  on_first({.threads = 1}, [](Worker& worker) {
    for (int i = 0; i < 45; ++i) worker.rpc_sync(1, kNap, i % 9 == 0 ? 100 : 0);
    auto busy = worker.rpc_async(1, kNapOnPool, 1000);
    worker.runtime().executor.sleep(milliseconds(10));
    const TimePoint before = worker.runtime().executor.now();
    worker.rpc_sync(1, kNap, 0);
    EXPECT_LT(worker.runtime().executor.now() - before, milliseconds(5));
    busy.wait();
  });
}

TEST(Inline, KeepsRequestsAndRepliesApartUnderLoad) {
  on_first({.workers = 3}, [](Worker& worker) {
    std::vector<Future<std::int64_t>> calls;
    for (std::int64_t i = 0; i < 300; ++i) calls.push_back(worker.rpc_async(1 + i % 2, kNext, i));
    const auto values = wait_all(calls);
    for (std::int64_t i = 0; i < 300; ++i) EXPECT_EQ(values[i], i + 1);
  });
}

}  // namespace
}  // namespace torchspan::inline_test
