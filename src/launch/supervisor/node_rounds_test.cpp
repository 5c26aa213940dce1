#include "launch/supervisor/node_rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "launch/supervisor/simulated_hosts.h"

namespace torchspan::launch::node_rounds_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Phase = NodeState::Phase;

/// One launcher of a simulated job.
class Launcher {
 public:
  Launcher(SimulatedHosts& world, int node, int nodes)
      : Launcher(world.executor(), world.meeting(node, nodes)) {}
  Launcher(Executor& executor, NodeMeeting meeting)
      : executor_(executor),
        parker_(executor_.make_parker()),
        rounds_(std::make_unique<NodeRounds>(executor_, std::move(meeting), [this] { parker_->unpark(); })) {}

  NodeRounds& rounds() { return *rounds_; }
  /// Takes rounds until one satisfies `wanted`, or there are no more; returns all that it took.
  std::deque<NodeStates> until(const std::function<bool(const NodeStates&)>& wanted) {
    std::deque<NodeStates> seen;
    for (;;) {
      for (NodeStates& states : rounds_->take()) {
        seen.push_back(std::move(states));
        if (wanted(seen.back())) return seen;
      }
      if (rounds_->failure()) return seen;
      parker_->park(Deadline::never());
    }
  }
  Error failure() {
    until([](const NodeStates&) { return false; });
    return *rounds_->failure();
  }

 private:
  Executor& executor_;
  const std::unique_ptr<Parker> parker_;
  const std::unique_ptr<NodeRounds> rounds_;
};

NodeState at(int attempt, Phase phase) {
  NodeState state;
  state.attempt = attempt;
  state.phase = phase;
  return state;
}

std::string text_of(const NodeStates& states) {
  std::string text;
  for (const NodeState& state : states) {
    text += std::to_string(state.attempt) + "." + std::to_string(static_cast<int>(state.phase)) + " ";
  }
  return text;
}

class SimulatedLaunchers : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, SimulatedLaunchers, ::testing::Range<std::uint64_t>(1, 9));

/// Three launchers go through attempts at random times. Each waits for all before it goes on.
TEST_P(SimulatedLaunchers, SeeTheSameRoundsInTheSameOrder) {
  constexpr int kNodes = 3, kAttempts = 4;
  SimulatedHosts world(GetParam(), kNodes);
  std::vector<std::vector<std::string>> seen(kNodes);
  world.run([&](int node) {
    auto& executor = world.executor();
    executor.sleep(milliseconds(executor.random() % 3000));
    Launcher launcher(world, node, kNodes);
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      for (const Phase phase : {Phase::kReady, Phase::kRunning, Phase::kEnded}) {
        executor.sleep(milliseconds(executor.random() % 2000));
        launcher.rounds().publish(at(attempt, phase));
        const auto rounds =
            launcher.until([&](const NodeStates& states) { return all_reached(states, attempt, phase); });
        for (const NodeStates& states : rounds)
          seen[static_cast<std::size_t>(node)].push_back(text_of(states));
      }
    }
    EXPECT_FALSE(launcher.rounds().failure());
  });
  EXPECT_EQ(seen[0].back(), "3.2 3.2 3.2 ");
  EXPECT_EQ(seen[1], seen[0]);
  EXPECT_EQ(seen[2], seen[0]);
}

TEST_P(SimulatedLaunchers, SendTheirLastStateBeforeTheyLeave) {
  SimulatedHosts world(GetParam(), 2);
  world.run([&](int node) {
    auto launcher = std::make_unique<Launcher>(world, node, 2);
    launcher->rounds().publish(at(0, Phase::kRunning));
    launcher->until([](const NodeStates&) { return true; });
    if (node == static_cast<int>(GetParam() % 2)) {
      NodeState last = at(0, Phase::kRunning);
      last.signal = 15;
      launcher->rounds().publish(last);
      launcher.reset();
      return;
    }
    const auto rounds =
        launcher->until([](const NodeStates& states) { return states[0].signal + states[1].signal != 0; });
    EXPECT_EQ(rounds.back()[0].signal + rounds.back()[1].signal, 15);
    EXPECT_THAT(launcher->failure().message(), HasSubstr("launcher" + std::to_string(1 - node)));
  });
}

TEST_P(SimulatedLaunchers, NameALauncherThatDies) {
  for (const int victim : {0, 2}) {
    SimulatedHosts world(GetParam(), 3);
    world.run([&](int node) {
      Launcher launcher(world, node, 3);
      launcher.rounds().publish(at(0, Phase::kRunning));
      launcher.until([](const NodeStates&) { return true; });
      if (node == victim) {
        world.executor().sleep(milliseconds(world.executor().random() % 1000));
        world.kill(node);
      }
      const TimePoint before = world.executor().now();
      const Error failure = launcher.failure();
      if (node != victim) {
        EXPECT_LT(world.executor().now() - before, seconds(10));
        EXPECT_THAT(failure.message(), HasSubstr("launcher" + std::to_string(victim)));
      }
    });
  }
}

TEST_P(SimulatedLaunchers, NameTheHostsThatDoNotJoin) {
  SimulatedHosts world(GetParam(), 2);
  world.run([&](int node) {
    if (node == 1) return;
    Launcher launcher(world, node, 4);
    launcher.rounds().publish(at(0, Phase::kReady));
    const Error failure = launcher.failure();
    EXPECT_EQ(failure.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(failure.message(), AllOf(HasSubstr("within 10 s: 1, 2, 3"), HasSubstr("--node-rank")));
  });
}

TEST_P(SimulatedLaunchers, SayThatHost0DoesNotAnswer) {
  SimulatedHosts world(GetParam(), 2);
  world.run([&](int node) {
    if (node == 0) return;
    Launcher launcher(world, node, 2);
    const Error failure = launcher.failure();
    EXPECT_EQ(failure.kind(), ErrorKind::kTimedOut);
    EXPECT_THAT(failure.message(),
                AllOf(HasSubstr("host 0"), HasSubstr("sim:store"), HasSubstr("within 10 s")));
  });
}

TEST_P(SimulatedLaunchers, ReplaceControlCharactersInWhatHost0Sends) {
  SimulatedHosts world(GetParam(), 2);
  world.run([&](int node) {
    NodeMeeting meeting = world.meeting(node, 2);
    if (node == 0) meeting.join.job = "another\x1b[2J";
    Launcher launcher(world.executor(), std::move(meeting));
    launcher.rounds().publish(at(0, Phase::kReady));
    const Error failure = launcher.failure();
    if (node == 0) return;
    EXPECT_THAT(failure.message(), HasSubstr("belongs to job 'another [2J'"));
  });
}

TEST_P(SimulatedLaunchers, EndWhileTheyWaitForTheOthers) {
  for (const int alone : {0, 1}) {
    SimulatedHosts world(GetParam(), 2);
    world.run([&](int node) {
      if (node != alone) return;
      const TimePoint before = world.executor().now();
      {
        Launcher launcher(world, node, 2);
        launcher.rounds().publish(at(0, Phase::kReady));
        world.executor().sleep(milliseconds(500));
      }
      EXPECT_LT(world.executor().now() - before, seconds(5)) << "the limit of the meeting is 10 s";
    });
  }
}

}  // namespace
}  // namespace torchspan::launch::node_rounds_test
