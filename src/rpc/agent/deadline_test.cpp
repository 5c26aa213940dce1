#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <sstream>
#include <unistd.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "core/api/timeout_notice.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::deadline_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;
using torchspan::testing::kind_of;

/// Counts what the handlers of one test saw. No worker owns it, because one process holds all workers.
struct Seen {
  std::atomic<int> begun{0};
  std::atomic<int> stopped{0};
  std::atomic<int> ended{0};
};

struct Board {
  Seen seen;
  std::int64_t begun() const { return seen.begun; }
  std::int64_t stopped() const { return seen.stopped; }
  std::int64_t ended() const { return seen.ended; }
};

std::int64_t left_ms(Worker& worker) {
  const auto call = worker.current_call();
  if (!call || call->deadline.is_never()) return -1;
  return call->deadline.left(worker.runtime().executor.now()) / milliseconds(1);
}
std::int64_t left_next_ms(Worker& worker);
std::int64_t left_next_detached_ms(Worker& worker);
Task<std::int64_t> left_next_coroutine_ms(Worker& worker);
Future<std::int64_t> left_in_continuation_ms(Worker& worker);
std::string caller_name(Worker& worker) { return worker.current_call()->caller.name; }

/// Works until its stop token is stopped, for ten seconds at most.
void work(Worker& worker, const RRef<Board>& board) {
  Seen& seen = board.local_value().seen;
  ++seen.begun;
  const auto stop = worker.current_call()->stop;
  for (int i = 0; i < 1000; ++i) {
    if (stop.stop_requested()) {
      ++seen.stopped;
      throw std::runtime_error("stop requested");
    }
    worker.runtime().executor.sleep(milliseconds(10));
  }
  ++seen.ended;
}
/// Waits for work() on the board's owner.
void delegate(Worker& worker, const RRef<Board>& board);
/// Calls work() on the board's owner and does not wait for it.
void leave_behind(Worker& worker, const RRef<Board>& board);
void nap(Worker& worker, std::int64_t ms) { worker.runtime().executor.sleep(milliseconds(ms)); }
std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }

constexpr Function<left_ms> kLeft{"left_ms"};
constexpr Function<left_next_ms> kLeftNext{"left_next_ms"};
constexpr Function<left_next_detached_ms> kLeftNextDetached{"left_next_detached_ms"};
constexpr Function<left_next_coroutine_ms> kLeftNextCoroutine{"left_next_coroutine_ms"};
constexpr Function<left_in_continuation_ms> kLeftInContinuation{"left_in_continuation_ms"};
constexpr Function<caller_name> kCallerName{"caller_name"};
constexpr Function<work> kWork{"work"};
constexpr Function<delegate> kDelegate{"delegate"};
constexpr Function<leave_behind> kLeaveBehind{"leave_behind"};
constexpr Function<nap> kNap{"nap"};
constexpr Function<add> kAdd{"add"};
constexpr Class<Board> kBoard{"Board"};
constexpr Function<&Board::begun> kBegun{"Board.begun"};
constexpr Function<&Board::stopped> kStopped{"Board.stopped"};
constexpr Function<&Board::ended> kEnded{"Board.ended"};

std::uint32_t next(Worker& worker) { return (worker.rank() + 1) % worker.world_size(); }
std::int64_t left_next_ms(Worker& worker) {
  worker.runtime().executor.sleep(milliseconds(100));
  return worker.rpc_sync(next(worker), kLeft);
}
std::int64_t left_next_detached_ms(Worker& worker) {
  return worker.with({.timeout = seconds(30), .detached = true}).rpc_sync(next(worker), kLeft);
}
Task<std::int64_t> left_next_coroutine_ms(Worker& worker) {
  co_await worker.rpc_async(next(worker), kNap, 100);
  co_return co_await worker.rpc_async(next(worker), kLeft);
}
Future<std::int64_t> left_in_continuation_ms(Worker& worker) {
  return worker.rpc_async(next(worker), kNap, 100).then([worker](Future<void> nap) mutable {
    nap.wait();
    return worker.rpc_sync(next(worker), kLeft);
  });
}
void delegate(Worker&, const RRef<Board>& board) { board.rpc_sync(kWork); }
void leave_behind(Worker& worker, const RRef<Board>& board) {
  static_cast<void>(worker.with({.timeout = seconds(2), .detached = true}).call_on(board, kWork));
}

void on_first(ClusterOptions options, const std::function<void(Worker&, SimCluster&)>& body) {
  options.functions.add(kLeft, kLeftNext, kLeftNextDetached, kLeftNextCoroutine, kLeftInContinuation,
                        kCallerName, kWork, kDelegate, kLeaveBehind, kNap, kAdd, kBoard, kBegun, kStopped,
                        kEnded);
  const bool graceful = options.graceful;
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) return body(worker, world);
    if (!graceful) worker.runtime().executor.sleep(seconds(60));
  });
}

/// Waits until the board shows the value, or five simulated seconds have passed.
template <class Read>
void expect_soon(Worker& worker, const RRef<Board>& board, Read read, std::int64_t value) {
  for (int i = 0; i < 50 && board.rpc_sync(read) != value; ++i)
    worker.runtime().executor.sleep(milliseconds(100));
  EXPECT_EQ(board.rpc_sync(read), value);
}

// peer: rpc/more the callee knows the remaining time, and nested calls inherit it: better
TEST(Deadlines, ArriveAtTheHandler) {
  on_first({}, [](Worker& worker, SimCluster&) {
    EXPECT_EQ(worker.current_call(), std::nullopt);
    const auto left = worker.with({.timeout = seconds(7)}).rpc_sync(1, kLeft);
    EXPECT_GT(left, 6990);
    EXPECT_LE(left, 7000);
    EXPECT_EQ(worker.with({.timeout = Duration::zero()}).rpc_sync(1, kLeft), -1);
    EXPECT_EQ(worker.rpc_sync(1, kCallerName), "worker0");
    EXPECT_EQ(worker.rpc_sync(0, kCallerName), "worker0");
  });
}

// peer: rpc/more the callee knows the remaining time
TEST(Deadlines, AreInheritedByNestedCallsOfEveryKindOfHandler) {
  on_first({.workers = 3}, [](Worker& worker, SimCluster&) {
    const auto caller = worker.with({.timeout = seconds(2)});
    for (const std::int64_t left : {caller.rpc_sync(1, kLeftNext), caller.rpc_sync(1, kLeftNextCoroutine),
                                    caller.rpc_sync(1, kLeftInContinuation)}) {
      EXPECT_GT(left, 1800);
      EXPECT_LE(left, 1900);
    }
    EXPECT_GT(caller.rpc_sync(1, kLeftNextDetached), 29000);
  });
}

// peer: rpc/more the stop token of a handler that outlives its deadline is stopped: better
TEST(Deadlines, StopTheHandlerThatOutlivesThem) {
  on_first({}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(1, kBoard);
    EXPECT_EQ(kind_of([&] { worker.with({.timeout = milliseconds(300)}).call_on(board, kWork).wait(); }),
              ErrorKind::kTimedOut);
    expect_soon(worker, board, kStopped, 1);
    EXPECT_EQ(board.rpc_sync(kEnded), 0);
  });
}

/// The pipe to a launcher, to which the workers of this process report what times out. Make it before the workers.
class NoticePipe {
 public:
  NoticePipe() {
    if (pipe2(ends_.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw std::runtime_error("no pipe");
    setenv("TORCHSPAN_PROGRESS_FD", std::to_string(ends_[1]).c_str(), 1);
  }
  ~NoticePipe() {
    unsetenv("TORCHSPAN_PROGRESS_FD");
    for (const int end : ends_) close(end);
  }
  NoticePipe(const NoticePipe&) = delete;

  std::vector<TimeoutNotice> read_all() const {
    std::vector<TimeoutNotice> notices;
    std::array<char, 65536> bytes;
    const ssize_t size = read(ends_[0], bytes.data(), bytes.size());
    std::istringstream lines(std::string(bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0))));
    for (std::string line; std::getline(lines, line);) {
      if (auto notice = decode_timeout(line)) notices.push_back(std::move(*notice));
    }
    return notices;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

/// The call of delegate() ends before, or together with, the call whose handler makes it: both inherit one deadline.
TEST(Deadlines, AreReportedForACallAndForTheCallOfItsHandlerWhichNamesTheHandler) {
  const NoticePipe launcher;
  on_first({.workers = 3}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(2, kBoard);
    board.creation().wait();
    EXPECT_EQ(kind_of([&] { worker.with({.timeout = seconds(3)}).rpc_sync(1, kDelegate, board); }),
              ErrorKind::kTimedOut);
    expect_soon(worker, board, kStopped, 1);
  });
  std::map<std::string, TimeoutNotice> notices;
  for (TimeoutNotice& notice : launcher.read_all())
    notices[notice.kind + " " + notice.name] = std::move(notice);
  ASSERT_EQ(notices.size(), 3u);
  EXPECT_EQ(notices.at("call delegate").peer, "worker1");
  EXPECT_EQ(notices.at("call work").peer, "worker2");
  const TimeoutNotice& handler = notices.at("handler delegate");
  EXPECT_EQ(handler.peer, "worker0");
  EXPECT_GT(handler.seconds, 2.9);
  EXPECT_LT(handler.seconds, 3.1);
}

/// No call of the caller waits for a handler that has returned.
TEST(Deadlines, AreReportedWithoutAHandlerThatHasReturned) {
  const NoticePipe launcher;
  on_first({.workers = 3}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(2, kBoard);
    board.creation().wait();
    worker.rpc_sync(1, kLeaveBehind, board);
    expect_soon(worker, board, kStopped, 1);
  });
  const auto notices = launcher.read_all();
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_EQ(notices[0].kind, "call");
  EXPECT_EQ(notices[0].name, "work");
}

TEST(Deadlines, RefuseNegativeTimeouts) {
  on_first({}, [](Worker& worker, SimCluster&) {
    EXPECT_EQ(kind_of([&] { worker.with({.timeout = milliseconds(-1)}).rpc_sync(1, kAdd, 1, 2); }),
              ErrorKind::kInvalid);
  });
}

// peer: rpc/more calls can be cancelled, together with the calls their handlers made: better
TEST(Cancellation, FailsTheCallAtOnceAndStopsItsHandler) {
  on_first({}, [](Worker& worker, SimCluster&) {
    for (const std::uint32_t owner : {1u, 0u}) {
      auto board = worker.remote(owner, kBoard);
      std::stop_source source;
      auto call = worker.with({.stop = source.get_token()}).call_on(board, kWork);
      expect_soon(worker, board, kBegun, 1);
      EXPECT_FALSE(call.done());
      const TimePoint before = worker.runtime().executor.now();
      source.request_stop();
      try {
        call.wait();
        FAIL() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
        EXPECT_EQ(error.worker(), SimCluster::name(static_cast<int>(owner)));
        EXPECT_EQ(error.call(), "work");
      }
      EXPECT_LT(worker.runtime().executor.now() - before, milliseconds(5));
      expect_soon(worker, board, kStopped, 1);
    }
  });
}

// peer: rpc/more calls can be cancelled
TEST(Cancellation, ReachesTheCallsThatTheHandlerMade) {
  on_first({.workers = 3}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(2, kBoard);
    std::stop_source source;
    auto call = worker.with({.stop = source.get_token()}).rpc_async(1, kDelegate, board);
    expect_soon(worker, board, kBegun, 1);
    source.request_stop();
    EXPECT_EQ(kind_of([&] { call.wait(); }), ErrorKind::kCancelled);
    expect_soon(worker, board, kStopped, 1);
  });
}

TEST(Cancellation, OfAStoppedTokenMakesNoCall) {
  on_first({}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(1, kBoard);
    std::stop_source source;
    source.request_stop();
    auto call = worker.with({.stop = source.get_token()}).call_on(board, kWork);
    EXPECT_EQ(kind_of([&] { call.wait(); }), ErrorKind::kCancelled);
    worker.runtime().executor.sleep(seconds(1));
    EXPECT_EQ(board.rpc_sync(kBegun), 0);
  });
}

// peer: rpc/more calls can be cancelled
TEST(Cancellation, DropsWorkThatHasNotBegun) {
  on_first({.threads = 1}, [](Worker& worker, SimCluster&) {
    auto board = worker.remote(1, kBoard);
    board.creation().wait();
    auto busy = worker.rpc_async(1, kNap, 500);
    std::stop_source source;
    auto call = worker.with({.stop = source.get_token()}).call_on(board, kWork);
    worker.runtime().executor.sleep(milliseconds(100));
    source.request_stop();
    EXPECT_EQ(kind_of([&] { call.wait(); }), ErrorKind::kCancelled);
    busy.wait();
    worker.runtime().executor.sleep(seconds(1));
    EXPECT_EQ(board.rpc_sync(kBegun), 0);
  });
}

// peer: rpc/more the handlers of a caller that dies are stopped: better
TEST(Cancellation, ReachesTheHandlersOfACallerThatDies) {
  ClusterOptions options{.workers = 3, .graceful = false};
  on_first(options, [](Worker& worker, SimCluster& world) {
    auto board = worker.remote(1, kBoard);
    auto call = worker.rpc_async(2, kDelegate, board);
    expect_soon(worker, board, kBegun, 1);
    world.kill(2);
    EXPECT_EQ(kind_of([&] { call.wait(); }), ErrorKind::kDisconnected);
    expect_soon(worker, board, kStopped, 1);
  });
}

TEST(Cancellation, AfterTheReplyDoesNothing) {
  on_first({}, [](Worker& worker, SimCluster&) {
    std::stop_source source;
    auto sum = worker.with({.stop = source.get_token()}).rpc_async(1, kAdd, 1, 2);
    EXPECT_EQ(sum.wait(), 3);
    source.request_stop();
    EXPECT_EQ(sum.wait(), 3);
    EXPECT_EQ(worker.rpc_sync(1, kAdd, 2, 2), 4);
  });
}

TEST(WaitScope, WaitsForEveryCallMadeThroughIt) {
  on_first({}, [](Worker& worker, SimCluster&) {
    const TimePoint start = worker.runtime().executor.now();
    std::vector<Future<void>> naps;
    {
      WaitScope calls(worker);
      for (int i = 1; i <= 3; ++i) naps.push_back(calls.rpc_async(1, kNap, 100 * i));
      calls.wait();
      for (auto& one : naps) EXPECT_TRUE(one.done());
      EXPECT_GE(worker.runtime().executor.now() - start, milliseconds(300));
      naps.push_back(calls.rpc_async(1, kNap, 50));
    }
    EXPECT_TRUE(naps.back().done()) << "the destructor waits too";
  });
}

TEST(WaitScope, ThrowsTheFirstFailureWhileOthersStillRun) {
  on_first({.threads = 8}, [](Worker& worker, SimCluster&) {
    WaitScope calls(worker);
    auto slow = calls.rpc_async(1, kNap, 2000);
    static_cast<void>(calls.rpc_async(1, "aten::no_such_operator", {}));
    EXPECT_EQ(kind_of([&] { calls.wait(); }), ErrorKind::kInvalid);
    EXPECT_FALSE(slow.done());
  });
}

TEST(WaitScope, EndsItsWaitAtTheDeadline) {
  on_first({}, [](Worker& worker, SimCluster&) {
    WaitScope calls(worker);
    static_cast<void>(calls.rpc_async(1, kNap, 1000));
    EXPECT_EQ(kind_of([&] { calls.wait(milliseconds(10)); }), ErrorKind::kTimedOut);
    calls.wait();
  });
}

TEST(WhenAll, KeepsTheOrderAndFailsEarly) {
  on_first({.threads = 8}, [](Worker& worker, SimCluster&) {
    std::vector<Future<std::int64_t>> sums;
    for (std::int64_t i = 0; i < 100; ++i) sums.push_back(worker.rpc_async(1, kAdd, i, 1));
    const std::vector<std::int64_t> values = wait_all(sums);
    ASSERT_EQ(values.size(), 100u);
    for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(values[i], i + 1);

    std::vector<Future<void>> mixed{worker.rpc_async(1, kNap, 5000),
                                    worker.with({.timeout = milliseconds(20)}).rpc_async(1, kNap, 5000)};
    EXPECT_EQ(kind_of([&] { wait_all(mixed); }), ErrorKind::kTimedOut);
    EXPECT_FALSE(mixed[0].done());
    EXPECT_TRUE(wait_all(std::vector<Future<std::int64_t>>{}).empty());
  });
}

TEST(DebugInfo, ListsWhatWaitsAndWhatRuns) {
  on_first({.threads = 1}, [](Worker& worker, SimCluster&) {
    auto first = worker.rpc_async(0, kNap, 300);
    auto second = worker.with({.timeout = Duration::zero()}).rpc_async(0, kNap, 1);
    worker.runtime().executor.sleep(milliseconds(100));
    const DebugInfo info = worker.debug();
    EXPECT_EQ(info.worker, "worker0");
    ASSERT_EQ(info.pending.size(), 2u);
    EXPECT_EQ(info.pending[0].call, "nap");
    EXPECT_EQ(info.pending[0].to, "worker0");
    EXPECT_THAT(info.pending[0].site, HasSubstr("deadline_test.cpp:"));
    EXPECT_GE(info.pending[0].age, milliseconds(100));
    EXPECT_LT(info.pending[0].left, seconds(60));
    EXPECT_EQ(info.pending[1].left, Duration::max());
    ASSERT_EQ(info.serving.size(), 2u);
    EXPECT_EQ(info.serving[0].call, "nap");
    EXPECT_EQ(info.serving[0].from, "worker0");
    EXPECT_TRUE(info.serving[0].begun);
    EXPECT_FALSE(info.serving[1].begun);
    EXPECT_THAT(info.str(), HasSubstr("runs 'nap' of worker 'worker0'"));
    EXPECT_THAT(info.str(), HasSubstr("without deadline"));
    wait_all(std::vector<Future<void>>{first, second});
    const DebugInfo after = worker.debug();
    EXPECT_TRUE(after.pending.empty());
    EXPECT_TRUE(after.serving.empty());
    EXPECT_EQ(after.calls_sent, 2u);
  });
}

}  // namespace
}  // namespace torchspan::deadline_test
