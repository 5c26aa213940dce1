#include <algorithm>
#include <array>
#include <atomic>
#include <fcntl.h>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <span>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

#include "tests/support/errors.h"

namespace torchspan::executor_test {
namespace {

using namespace std::chrono_literals;
using torchspan::testing::kind_of;

class RealExecutor : public ::testing::Test {
 protected:
  /// Far enough that reaching it means a lost wake-up.
  Deadline patience() const { return executor_->deadline_in(30s); }

  std::unique_ptr<Executor> executor_ = make_executor();
};
using RealParker = RealExecutor;

TEST_F(RealParker, TakesATokenLeftBeforeThePark) {
  const auto parker = executor_->make_parker();
  parker->unpark();
  EXPECT_TRUE(parker->park(patience()));
}

TEST_F(RealParker, KeepsOneTokenHoweverOftenItIsUnparked) {
  const auto parker = executor_->make_parker();
  parker->unpark();
  parker->unpark();
  EXPECT_TRUE(parker->park(patience()));
  EXPECT_FALSE(parker->park(executor_->deadline_in(1ms)));
}

TEST_F(RealParker, TakesATokenEvenWhenTheDeadlineHasPassed) {
  const auto parker = executor_->make_parker();
  parker->unpark();
  EXPECT_TRUE(parker->park(executor_->deadline_in(-1s)));
}

TEST_F(RealParker, ReturnsFalseAtTheDeadlineAndNotBefore) {
  const auto parker = executor_->make_parker();
  for (const Duration timeout : {Duration(0), Duration(1), Duration(300us), Duration(3ms)}) {
    const Deadline deadline = executor_->deadline_in(timeout);
    EXPECT_FALSE(parker->park(deadline));
    EXPECT_TRUE(deadline.passed(executor_->now()));
  }
}

TEST_F(RealParker, ReturnsAtOnceWhenTheDeadlineIsBeforeTheClockBegan) {
  const auto parker = executor_->make_parker();
  EXPECT_FALSE(parker->park(executor_->deadline_in(-24h * 365 * 100)));
  EXPECT_FALSE(parker->park(Deadline(TimePoint::min())));
}

TEST_F(RealParker, WakesASleeperInEachOfManyTurns) {
  constexpr int kTurns = 2000;
  const auto ping = executor_->make_parker();
  const auto pong = executor_->make_parker();
  Thread thread = executor_->spawn("answers", [&] {
    for (int i = 0; i < kTurns; ++i) {
      if (!ping->park(patience())) return;
      pong->unpark();
    }
  });
  for (int i = 0; i < kTurns; ++i) {
    ping->unpark();
    ASSERT_TRUE(pong->park(patience())) << "turn " << i;
  }
}

// The unparker aims at the moment at which the sleeper times out, and adjusts its aim by which of the two
// came first. In either case the token ends this park or the next one.
TEST_F(RealParker, LosesNoTokenWhenUnparkRacesWithTheDeadline) {
  constexpr int kTurns = 1500;
  const auto parker = executor_->make_parker();
  std::atomic<int> turn{0}, aim_ns{30'000};
  Thread thread = executor_->spawn("unparks", [&] {
    for (int i = 1; i <= kTurns; ++i) {
      while (turn.load(std::memory_order_acquire) < i) executor_->yield();
      if (turn.load(std::memory_order_acquire) > kTurns) return;
      const TimePoint when = executor_->now() + std::chrono::nanoseconds(aim_ns.load());
      while (executor_->now() < when) {
      }
      parker->unpark();
    }
  });
  int timed_out = 0;
  bool lost = false;
  for (int i = 1; i <= kTurns && !lost; ++i) {
    const Deadline deadline = executor_->deadline_in(20us);
    turn.store(i, std::memory_order_release);
    if (parker->park(deadline)) {
      aim_ns += 300;
    } else {
      aim_ns = std::max(aim_ns - 300, 0);
      ++timed_out;
      lost = !parker->park(patience());
    }
  }
  EXPECT_FALSE(lost) << "a token was lost";
  EXPECT_FALSE(parker->park(executor_->deadline_in(0s))) << "a token too many";
  EXPECT_GT(timed_out, 0);
  EXPECT_LT(timed_out, kTurns);
  turn.store(kTurns + 1, std::memory_order_release);
}

// What was written before an unpark must be visible after the park that its token ends, also if a second
// unpark arrives while the first token is being taken.
TEST_F(RealParker, MakesWritesBeforeEachOfTwoUnparksVisible) {
  // The two pauses below have 61 × 53 combinations.
  constexpr int kTurns = 3 * 61 * 53;
  const auto parker = executor_->make_parker();
  std::atomic<int> turn{0}, first{0}, second{0};
  Thread thread = executor_->spawn("unparks", [&] {
    for (int i = 1; i <= kTurns; ++i) {
      while (turn.load(std::memory_order_acquire) < i) executor_->yield();
      if (turn.load(std::memory_order_acquire) > kTurns) return;
      first.store(i, std::memory_order_relaxed);
      parker->unpark();
      for (int pause = i % 61; pause > 0; --pause) turn.load(std::memory_order_acquire);
      second.store(i, std::memory_order_relaxed);
      parker->unpark();
    }
  });
  bool lost = false;
  for (int i = 1; i <= kTurns && !lost; ++i) {
    turn.store(i, std::memory_order_release);
    for (int pause = i % 53; pause > 0; --pause) turn.load(std::memory_order_acquire);
    const Deadline deadline = patience();
    while (!lost &&
           (first.load(std::memory_order_relaxed) != i || second.load(std::memory_order_relaxed) != i)) {
      lost = !parker->park(deadline);
    }
  }
  EXPECT_FALSE(lost) << "a wake-up was lost";
  turn.store(kTurns + 1, std::memory_order_release);
}

TEST_F(RealExecutor, SleepsAtLeastAsLongAsAsked) {
  const TimePoint began = executor_->now();
  executor_->sleep(2ms);
  EXPECT_GE(executor_->now() - began, 2ms);
  executor_->sleep(-1h);
}

TEST_F(RealExecutor, TurnsAnInfiniteTimeoutIntoADeadlineThatNeverPasses) {
  EXPECT_TRUE(executor_->deadline_in(Duration::max()).is_never());
  EXPECT_FALSE(executor_->deadline_in(24h * 365).is_never());
  EXPECT_TRUE(executor_->deadline_in(Duration::min()).passed(executor_->now()));
}

TEST_F(RealExecutor, JoinsAThreadAfterItsBodyAndWhatTheBodyCaptured) {
  const auto ended = std::make_shared<std::atomic<int>>(0);
  struct CountsEnd {
    std::shared_ptr<std::atomic<int>> ended;
    explicit CountsEnd(std::shared_ptr<std::atomic<int>> ended) : ended(std::move(ended)) {}
    ~CountsEnd() { ++*ended; }
  };
  Thread thread = executor_->spawn("a name longer than the fifteen characters of Linux",
                                   [counter = std::make_shared<CountsEnd>(ended), ended] { ++*ended; });
  EXPECT_TRUE(thread.joinable());
  EXPECT_FALSE(thread.is_current());
  thread.join();
  EXPECT_EQ(*ended, 2);
  EXPECT_FALSE(thread.joinable());
  EXPECT_FALSE(thread.is_current());
}

TEST_F(RealExecutor, JoinsTheOldThreadWhenANewOneTakesItsPlace) {
  std::atomic<int> ended{0};
  Thread thread = executor_->spawn("old", [&] {
    executor_->sleep(1ms);
    ++ended;
  });
  thread = executor_->spawn("new", [&] { ++ended; });
  EXPECT_GE(ended, 1);
  thread.join();
  EXPECT_EQ(ended, 2);
}

class RealPoller : public RealExecutor {
 protected:
  struct Descriptor {
    int fd;
    explicit Descriptor(int fd) : fd(fd) {}
    ~Descriptor() { reset(); }
    Descriptor(const Descriptor&) = delete;
    void reset() {
      if (fd >= 0) close(fd);
      fd = -1;
    }
  };
  struct Pipe {
    Descriptor out{-1}, in{-1};
    Pipe() {
      std::array<int, 2> ends{};
      if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw Error(ErrorKind::kOverloaded, "no pipe");
      out.fd = ends[0];
      in.fd = ends[1];
    }
    void write_byte() const { EXPECT_EQ(write(in.fd, "x", 1), 1); }
  };

  std::size_t wait_now() { return poller_->wait(events_, executor_->deadline_in(0s)); }

  std::unique_ptr<Poller> poller_ = executor_->make_poller();
  std::array<Poller::Event, 8> events_{};
};

TEST_F(RealPoller, ReportsAPipeByItsTokenWhileItIsReadable) {
  Pipe pipe;
  poller_->add(pipe.out.fd, 77, false);
  EXPECT_EQ(wait_now(), 0u);
  pipe.write_byte();
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(poller_->wait(events_, patience()), 1u);
    EXPECT_EQ(events_[0].token, 77u);
    EXPECT_TRUE(events_[0].readable);
    EXPECT_FALSE(events_[0].writable);
    EXPECT_FALSE(events_[0].hung_up);
  }
  char byte;
  ASSERT_EQ(read(pipe.out.fd, &byte, 1), 1);
  EXPECT_EQ(wait_now(), 0u);
}

TEST_F(RealPoller, WatchesForWritingOnlyWhenAsked) {
  Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  poller_->add(event.fd, 5, true);
  ASSERT_EQ(poller_->wait(events_, patience()), 1u);
  EXPECT_TRUE(events_[0].writable);
  EXPECT_FALSE(events_[0].readable);
  poller_->change(event.fd, 6, false);
  EXPECT_EQ(wait_now(), 0u);
  const std::uint64_t one = 1;
  ASSERT_EQ(write(event.fd, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  ASSERT_EQ(poller_->wait(events_, patience()), 1u);
  EXPECT_EQ(events_[0].token, 6u);
  poller_->remove(event.fd);
  EXPECT_EQ(wait_now(), 0u);
}

TEST_F(RealPoller, ReportsThatTheOtherEndClosed) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  Descriptor mine(ends[0]), other(ends[1]);
  poller_->add(mine.fd, 1, false);
  other.reset();
  ASSERT_EQ(poller_->wait(events_, patience()), 1u);
  EXPECT_TRUE(events_[0].hung_up);
  EXPECT_TRUE(events_[0].readable);
}

TEST_F(RealPoller, WakesForADescriptorThatAnotherThreadMadeReady) {
  Pipe pipe;
  poller_->add(pipe.out.fd, 3, false);
  Thread thread = executor_->spawn("writes", [&] { pipe.write_byte(); });
  ASSERT_EQ(poller_->wait(events_, patience()), 1u);
  EXPECT_EQ(events_[0].token, 3u);
}

TEST_F(RealPoller, EndsTheNextWaitWhenWokenBefore) {
  poller_->wake();
  poller_->wake();
  const Deadline deadline = patience();
  EXPECT_EQ(poller_->wait(events_, deadline), 0u);
  EXPECT_FALSE(deadline.passed(executor_->now()));
  const Deadline soon = executor_->deadline_in(1ms);
  EXPECT_EQ(poller_->wait(events_, soon), 0u);
  EXPECT_TRUE(soon.passed(executor_->now())) << "one wait was woken twice";
}

TEST_F(RealPoller, EndsAWaitWheneverAnotherThreadWakesIt) {
  constexpr int kTurns = 1000;
  std::atomic<int> turn{0};
  Thread thread = executor_->spawn("wakes", [&] {
    for (int i = 1; i <= kTurns; ++i) {
      while (turn.load() < i) executor_->yield();
      poller_->wake();
    }
  });
  for (int i = 1; i <= kTurns; ++i) {
    const Deadline deadline = patience();
    turn = i;
    EXPECT_EQ(poller_->wait(events_, deadline), 0u);
    ASSERT_FALSE(deadline.passed(executor_->now())) << "turn " << i;
  }
}

TEST_F(RealPoller, WaitsUntilItsDeadlineAndNotLess) {
  const Deadline deadline = executor_->deadline_in(2ms);
  EXPECT_EQ(poller_->wait(events_, deadline), 0u);
  EXPECT_TRUE(deadline.passed(executor_->now()));
}

TEST_F(RealPoller, ReturnsAsManyEventsAsFitAndTheRestLater) {
  std::array<Pipe, 5> pipes;
  for (std::size_t i = 0; i < pipes.size(); ++i) {
    poller_->add(pipes[i].out.fd, i, false);
    pipes[i].write_byte();
  }
  std::size_t seen = 0;
  while (seen < pipes.size()) {
    const std::size_t count = poller_->wait(std::span(events_).first(2), patience());
    ASSERT_LE(count, 2u);
    ASSERT_GE(count, 1u);
    for (std::size_t i = 0; i < count; ++i) poller_->remove(pipes[events_[i].token].out.fd);
    seen += count;
  }
  EXPECT_EQ(wait_now(), 0u);
}

TEST_F(RealPoller, RejectsDescriptorsThatCannotBePolled) {
  Pipe pipe;
  EXPECT_EQ(kind_of([&] { poller_->add(-1, 1, false); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { poller_->change(pipe.out.fd, 1, false); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { poller_->add(pipe.out.fd, ~std::uint64_t{0}, false); }), ErrorKind::kInvalid);
  poller_->add(pipe.out.fd, 1, false);
  EXPECT_EQ(kind_of([&] { poller_->add(pipe.out.fd, 2, false); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { poller_->wait({}, patience()); }), ErrorKind::kInvalid);
}

}  // namespace
}  // namespace torchspan::executor_test
