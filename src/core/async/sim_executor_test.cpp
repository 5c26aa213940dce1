#include "core/api/sim_executor.h"

#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>

#include <torchspan/core/error.h>

#include "core/async/trials.h"

namespace torchspan::sim_executor_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::int64_t us(TimePoint time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
}

/// Threads that sleep, yield, poll, wake each other, fire events and start further threads, all chosen by the
/// executor's seed; records every step. Only one thread runs at a time, so nothing is locked.
class RandomRun {
 public:
  explicit RandomRun(SimExecutor& executor) : executor_(executor) {
    for (int i = 0; i < 4; ++i) parkers_.push_back(executor.make_parker());
  }

  std::string run() {
    for (std::size_t i = 0; i < parkers_.size(); ++i) start(parkers_[i].get(), 20);
    while (!threads_.empty()) {
      Thread thread = std::move(threads_.back());
      threads_.pop_back();
      thread.join();
    }
    return trace_;
  }

 private:
  void start(Parker* parker, int moves) {
    const std::string name = "t" + std::to_string(started_++);
    threads_.push_back(executor_.spawn(name, [this, name, parker, moves] {
      for (int i = 0; i < moves; ++i) move(name, parker);
      note(name, "ends");
    }));
  }

  void move(const std::string& name, Parker* parker) {
    switch (executor_.random() % 7) {
      case 0:
        executor_.sleep(draw_time());
        return note(name, "slept");
      case 1:
        executor_.yield();
        return note(name, "yielded");
      case 2:
        if (parker == nullptr) return;
        return note(name, parker->park(executor_.deadline_in(draw_time())) ? "woken" : "timed out");
      case 3:
        parkers_[executor_.random() % parkers_.size()]->unpark();
        return note(name, "unparked");
      case 4: {
        const std::string tag = "e" + std::to_string(events_++);
        executor_.at(executor_.now() + draw_time(), [this, tag] {
          parkers_[executor_.random() % parkers_.size()]->unpark();
          note(tag, "fired");
        });
        return note(name, "planned");
      }
      case 5:
        if (started_ < 12) start(nullptr, 8);
        return note(name, "spawned");
      default:
        return note(name, "idled");
    }
  }

  Duration draw_time() { return std::chrono::microseconds(executor_.random() % 50); }
  void note(const std::string& who, const char* what) {
    trace_ += std::to_string(us(executor_.now())) + " " + who + " " + what + "\n";
  }

  SimExecutor& executor_;
  std::vector<std::unique_ptr<Parker>> parkers_;
  std::vector<Thread> threads_;
  std::string trace_;
  int started_ = 0;
  int events_ = 0;
};

struct Outcome {
  std::string trace;
  std::uint64_t steps = 0;
  TimePoint end;
};
Outcome random_run(std::uint64_t seed) {
  SimExecutor executor(seed);
  Outcome outcome;
  executor.run([&] { outcome.trace = RandomRun(executor).run(); });
  outcome.steps = executor.steps();
  outcome.end = executor.now();
  return outcome;
}

TEST(SimExecutor, RepeatsEveryStepOfASeed) {
  const auto seeds = testing::number_from("TORCHSPAN_CASES", std::uint64_t{15});
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const Outcome first = random_run(seed);
    const Outcome second = random_run(seed);
    ASSERT_EQ(first.trace, second.trace);
    EXPECT_EQ(first.steps, second.steps);
    EXPECT_EQ(first.end, second.end);
    EXPECT_GT(first.steps, 20u);
  }
}

TEST(SimExecutor, InterleavesDifferentlyForDifferentSeeds) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimExecutor executor(seed);
    std::string order;
    executor.run([&] {
      std::vector<Thread> threads;
      for (char name = 'a'; name < 'e'; ++name) {
        threads.push_back(executor.spawn(std::string(1, name), [&, name] {
          for (int i = 0; i < 4; ++i) {
            order += name;
            executor.yield();
          }
        }));
      }
    });
    EXPECT_EQ(order.size(), 16u);
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 35u);
}

TEST(SimExecutor, LetsOneThreadRunAtATime) {
  for_seeds(50, [](SimExecutor& executor) {
    int inside = 0;  // unguarded on purpose
    std::vector<Thread> threads;
    for (int i = 0; i < 5; ++i) {
      threads.push_back(executor.spawn("t", [&] {
        for (int turn = 0; turn < 10; ++turn) {
          EXPECT_EQ(++inside, 1);
          --inside;
          executor.yield();
        }
      }));
    }
  });
}

TEST(SimExecutor, SleepsAnHourOfVirtualTimeInstantly) {
  const auto real = make_executor();
  const TimePoint began = real->now();
  SimExecutor executor(1);
  executor.run([&] {
    executor.sleep(1h);
    EXPECT_EQ(executor.now(), TimePoint(1h));
    executor.sleep(24h * 365);
    EXPECT_EQ(executor.now(), TimePoint(1h + 24h * 365));
  });
  EXPECT_LT(real->now() - began, 1min);
}

TEST(SimExecutor, WakesEachSleeperAtItsDeadlineInOrder) {
  for_seeds(50, [](SimExecutor& executor) {
    std::vector<TimePoint> woken;
    std::vector<Thread> threads;
    for (int i = 0; i < 20; ++i) {
      const Duration time = std::chrono::milliseconds(executor.random() % 1000);
      threads.push_back(executor.spawn("sleeper", [&, time] {
        executor.sleep(time);
        EXPECT_EQ(executor.now(), TimePoint(std::max<Duration>(time, 0s)));
        woken.push_back(executor.now());
      }));
    }
    threads.clear();
    EXPECT_EQ(woken.size(), 20u);
    EXPECT_TRUE(std::is_sorted(woken.begin(), woken.end()));
  });
}

TEST(SimExecutor, FiresEventsAtTheirTimeInTheOrderOfScheduling) {
  for_seeds(20, [](SimExecutor& executor) {
    std::vector<std::pair<int, std::int64_t>> fired;
    const auto plan = [&](int name, Duration when) {
      executor.at(TimePoint(when),
                  [&fired, &executor, name] { fired.emplace_back(name, us(executor.now())); });
    };
    plan(3, 30ms);
    plan(1, 10ms);
    plan(2, 10ms);
    executor.at(TimePoint(20ms), [&] { plan(4, 5ms); });  // too late: fires now
    executor.sleep(1s);
    using Fired = std::pair<int, std::int64_t>;
    EXPECT_THAT(fired, ::testing::ElementsAre(Fired(1, 10'000), Fired(2, 10'000), Fired(4, 20'000),
                                              Fired(3, 30'000)));
  });
}

TEST(SimExecutor, WakesAParkedThreadFromAnEvent) {
  for_seeds(20, [](SimExecutor& executor) {
    const auto parker = executor.make_parker();
    executor.at(TimePoint(5ms), [&] { parker->unpark(); });
    EXPECT_TRUE(parker->park(executor.deadline_in(1h)));
    EXPECT_EQ(executor.now(), TimePoint(5ms));
  });
}

TEST(SimExecutor, LetsAnEventStartAThread) {
  for_seeds(20, [](SimExecutor& executor) {
    Thread thread;
    TimePoint slept;
    executor.at(TimePoint(5ms), [&] {
      thread = executor.spawn("started by an event", [&] {
        executor.sleep(1ms);
        slept = executor.now();
      });
    });
    executor.sleep(10ms);
    thread.join();
    EXPECT_EQ(slept, TimePoint(6ms));
  });
}

// What an event or a body captured may itself use the executor in its destructor.
struct AsksTheTimeAtItsEnd {
  SimExecutor& executor;
  TimePoint& ended;
  Duration lasts;
  AsksTheTimeAtItsEnd(SimExecutor& executor, TimePoint& ended, Duration lasts)
      : executor(executor), ended(ended), lasts(lasts) {}
  ~AsksTheTimeAtItsEnd() {
    if (lasts > 0s) executor.sleep(lasts);
    ended = executor.now();
  }
};

TEST(SimExecutor, DestroysAnEventWithoutItsOwnLock) {
  SimExecutor executor(1);
  TimePoint ended;
  executor.run([&] {
    executor.at(TimePoint(3ms), [asks = std::make_shared<AsksTheTimeAtItsEnd>(executor, ended, 0s)] {});
    executor.sleep(1s);
  });
  EXPECT_EQ(ended, TimePoint(3ms));
}

TEST(SimExecutor, DestroysABodyOnItsThreadBeforeTheThreadEnds) {
  for_seeds(50, [](SimExecutor& executor) {
    TimePoint ended;
    int others = 0;
    Thread other = executor.spawn("other", [&] {
      for (int i = 0; i < 10; ++i) {
        ++others;
        executor.sleep(1ms);
      }
    });
    Thread thread =
        executor.spawn("body", [asks = std::make_shared<AsksTheTimeAtItsEnd>(executor, ended, 5500us)] {});
    thread.join();
    EXPECT_EQ(ended, TimePoint(5500us));
    EXPECT_EQ(others, 6);
  });
}

TEST(SimParker, BehavesAsABinarySemaphore) {
  SimExecutor executor(1);
  executor.run([&] {
    const auto parker = executor.make_parker();
    parker->unpark();
    parker->unpark();
    EXPECT_TRUE(parker->park(Deadline::never()));
    EXPECT_EQ(executor.now(), TimePoint(0s));
    EXPECT_FALSE(parker->park(executor.deadline_in(3s)));
    EXPECT_EQ(executor.now(), TimePoint(3s));
    parker->unpark();
    EXPECT_TRUE(parker->park(executor.deadline_in(-1s)));
    EXPECT_FALSE(parker->park(Deadline(TimePoint::min())));
  });
}

TEST(SimParker, CountsATokenThatArrivesTogetherWithTheDeadline) {
  int woken = 0, timed_out = 0;
  for_seeds(100, [&](SimExecutor& executor) {
    const auto parker = executor.make_parker();
    Thread thread = executor.spawn("unparks", [&] {
      executor.sleep(1ms);
      parker->unpark();
    });
    bool unparked = parker->park(executor.deadline_in(1ms));
    ++(unparked ? woken : timed_out);
    if (!unparked) unparked = parker->park(Deadline::never());
    EXPECT_TRUE(unparked);
    EXPECT_FALSE(parker->park(executor.deadline_in(0s)));
  });
  EXPECT_GT(woken, 0);
  EXPECT_GT(timed_out, 0);
}

TEST(SimExecutor, MovesTheClockWhenOneThreadOnlyYields) {
  SimExecutor executor(1);
  executor.run([&] {
    while (executor.now() < TimePoint(1ms)) executor.yield();
  });
}

TEST(SimExecutor, MovesTheClockWhenSeveralThreadsOnlyPoll) {
  for_seeds(20, [](SimExecutor& executor) {
    bool ready = false;
    std::vector<Thread> threads;
    threads.push_back(executor.spawn("yields", [&] {
      while (!ready) executor.yield();
    }));
    threads.push_back(executor.spawn("parks", [&] {
      const auto parker = executor.make_parker();
      while (!ready) parker->park(executor.deadline_in(0s));
    }));
    threads.push_back(executor.spawn("polls", [&] {
      const auto poller = executor.make_poller();
      while (!ready) poller->wait({}, executor.deadline_in(0s));
    }));
    executor.sleep(100us);
    EXPECT_EQ(executor.now(), TimePoint(100us));
    ready = true;
  });
}

TEST(SimParker, MovesTheClockWhenAParkWithAPassedDeadlineIsRepeated) {
  SimExecutor executor(1);
  executor.run([&] {
    bool ready = false;
    executor.at(TimePoint(50us), [&] { ready = true; });
    const auto parker = executor.make_parker();
    while (!ready) parker->park(executor.deadline_in(0s));
    EXPECT_EQ(executor.now(), TimePoint(50us));
  });
}

TEST(SimExecutor, KeepsTheClockWhileAThreadHasWork) {
  for_seeds(20, [](SimExecutor& executor) {
    const auto ping = executor.make_parker();
    const auto pong = executor.make_parker();
    bool done = false;
    Thread poller = executor.spawn("yields", [&] {
      while (!done) executor.yield();
    });
    Thread works = executor.spawn("works", [&] {
      for (int i = 0; i < 20; ++i) {
        ping->park(Deadline::never());
        pong->unpark();
      }
    });
    const TimePoint began = executor.now();
    for (int i = 0; i < 20; ++i) {
      ping->unpark();
      pong->park(Deadline::never());
    }
    EXPECT_EQ(executor.now(), began);
    done = true;
  });
}

TEST(SimPoller, WaitsAndWakesButTakesNoDescriptors) {
  SimExecutor executor(1);
  executor.run([&] {
    const auto poller = executor.make_poller();
    poller->wake();
    EXPECT_EQ(poller->wait({}, Deadline::never()), 0u);
    EXPECT_EQ(poller->wait({}, executor.deadline_in(1s)), 0u);
    EXPECT_EQ(executor.now(), TimePoint(1s));
    try {
      poller->add(0, 1, false);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    }
  });
}

TEST(SimExecutor, JoinsThreadsThatSpawnThreads) {
  for_seeds(30, [](SimExecutor& executor) {
    int leaves = 0;
    const std::function<void(int)> grow = [&](int depth) {
      if (depth == 0) {
        ++leaves;
        return;
      }
      Thread left = executor.spawn("left", [&, depth] { grow(depth - 1); });
      Thread right = executor.spawn("right", [&, depth] { grow(depth - 1); });
    };
    grow(4);
    EXPECT_EQ(leaves, 16);
  });
}

TEST(SimExecutor, WaitsForThreadsThatOutliveMain) {
  SimExecutor executor(1);
  Thread thread;
  bool ended = false;
  executor.run([&] {
    thread = executor.spawn("outlives main", [&] {
      executor.sleep(1h);
      ended = true;
    });
  });
  EXPECT_TRUE(ended);
  EXPECT_EQ(executor.now(), TimePoint(1h));
  thread.join();
}

TEST(SimExecutor, RethrowsWhatMainThrowsAndRunsAgain) {
  SimExecutor executor(1);
  EXPECT_THROW(executor.run([&] {
    executor.sleep(1s);
    throw std::out_of_range("3");
  }),
               std::out_of_range);
  executor.run([&] { EXPECT_EQ(executor.now(), TimePoint(1s)); });
}

TEST(SimExecutor, RefusesToParkAThreadThatIsNotItsOwn) {
  SimExecutor executor(1);
  const auto parker = executor.make_parker();
  EXPECT_THROW(parker->park(Deadline::never()), Error);
  EXPECT_THROW(executor.yield(), Error);
  executor.run([&] { EXPECT_THROW(executor.run([] {}), Error); });
}

class SimExecutorDeath : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(SimExecutorDeath, NamesEveryThreadInADeadlock) {
  const auto deadlock = [] {
    SimExecutor executor(42);
    executor.run([&] {
      executor.sleep(7us);
      Thread left =
          executor.spawn("waits for right", [&] { executor.make_parker()->park(Deadline::never()); });
      Thread right =
          executor.spawn("waits for left", [&] { executor.make_parker()->park(Deadline::never()); });
    });
  };
  EXPECT_DEATH(deadlock(),
               AllOf(HasSubstr("deadlocked"), HasSubstr("seed 42"), HasSubstr("virtual time 7 us"),
                     HasSubstr("'main'"), HasSubstr("'waits for right'"), HasSubstr("'waits for left'")));
}

TEST_F(SimExecutorDeath, ReportsTheExceptionOfMainWhenItLeavesThreadsWaiting) {
  const auto deadlock = [] {
    SimExecutor executor(1);
    Thread thread;
    executor.run([&] {
      thread = executor.spawn("left alone", [&] { executor.make_parker()->park(Deadline::never()); });
      throw std::out_of_range("main's own trouble");
    });
  };
  EXPECT_DEATH(deadlock(), AllOf(HasSubstr("'left alone'"), HasSubstr("main's own trouble")));
}

TEST_F(SimExecutorDeath, RefusesAnEventThatParks) {
  const auto parks = [] {
    SimExecutor executor(1);
    executor.at(TimePoint(1ms), [&] { executor.sleep(1s); });
    executor.run([&] { executor.sleep(1s); });
  };
  EXPECT_DEATH(parks(), "events may not");
}

TEST(SimExecutor, LetsWaitingThreadsPollInVirtualTime) {
  for (const Duration limit : {Duration::zero(), Duration(40us)}) {
    SimExecutor executor(1);
    executor.set_spin_limit(limit);
    EXPECT_EQ(executor.spin_limit(), limit);
    executor.run([&] {
      const TimePoint end = executor.now() + executor.spin_limit();
      while (executor.now() < end) executor.yield();
      EXPECT_EQ(us(executor.now()), us(TimePoint(limit)));
    });
  }
}

}  // namespace
}  // namespace torchspan::sim_executor_test
