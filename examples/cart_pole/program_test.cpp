// Runs the example as users do, and its agent's batched answers.
#include <chrono>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/session.h>

#include "cart_pole/agent.h"
#include "tests/support/processes.h"

namespace cart_pole::program_test {
namespace {

using ::testing::HasSubstr;

std::pair<int, std::string> run_program(int workers, const std::vector<std::string>& arguments) {
  std::vector<std::string> command =
      torchspan::testing::launched({"-n", std::to_string(workers)}, "cart_pole");
  command.insert(command.end(), arguments.begin(), arguments.end());
  const torchspan::testing::TemporaryFolder output;
  const auto executor = torchspan::make_executor();
  torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, output.path() + "/output");
  EXPECT_TRUE(process.wait(*executor, std::chrono::seconds(120))) << process.output();
  return {process.exit_code(), process.output()};
}

/// The lengths that the curve shows.
std::vector<double> lengths_of(const std::string& output) {
  std::vector<double> lengths;
  const std::regex line("round +[0-9]+ +([0-9.]+)  #");
  for (std::sregex_iterator found(output.begin(), output.end(), line), end; found != end; ++found)
    lengths.push_back(std::stod((*found)[1]));
  return lengths;
}

TEST(CartPole, LearnsToBalanceAndHasTheSameCurveInOneProcess) {
  std::vector<double> first;
  for (const int workers : {2, 1}) {
    const auto [code, output] = run_program(workers, {"--rounds", "14", "--steps", "200", "--carts", "8"});
    ASSERT_EQ(code, 0) << output;
    const std::vector<double> lengths = lengths_of(output);
    ASSERT_GE(lengths.size(), 10u) << output;
    EXPECT_LT(lengths.front(), 50) << output;
    EXPECT_GT(lengths.back(), 2 * lengths.front()) << output;
    if (first.empty()) first = lengths;
    EXPECT_EQ(lengths, first) << "one actor elsewhere is the same as one here\n" << output;
  }
}

TEST(CartPole, RunsWithSeveralActors) {
  const auto [code, output] = run_program(3, {"--rounds", "2", "--steps", "20", "--carts", "5"});
  EXPECT_EQ(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("5 carts on 2 actors, policy on worker0"));
}

TEST(CartPole, NamesTheActorsThatHaveNoCart) {
  const auto [code, output] = run_program(3, {"--carts", "1"});
  EXPECT_NE(code, 0);
  EXPECT_THAT(output, HasSubstr("--carts 1: each of the 2 actors needs one"));
}

TEST(CartPole, TheAgentAnswersWhenAllActorsHaveCalled) {
  torchspan::Session session{torchspan::WorkerOptions()};
  const auto& worker = session.worker();
  Agent agent(worker, AgentOptions{.actors = 2});
  const auto ask = [&](std::int64_t actor, std::int64_t carts) {
    return agent->select(actor, at::randn({carts, 4}));
  };
  for (int step = 0; step < 3; ++step) {
    const auto first = ask(1, 3);
    EXPECT_FALSE(first.done());
    EXPECT_THROW(ask(1, 3).wait(), torchspan::Error) << "it already waits";
    EXPECT_THROW(ask(2, 3).wait(), torchspan::Error) << "there are two";
    const auto second = ask(0, 5);
    EXPECT_EQ(first.wait().sizes(), at::IntArrayRef({3}));
    EXPECT_EQ(second.wait().sizes(), at::IntArrayRef({5}));
  }
  session.shutdown();
}

TEST(CartPole, MeasuresFirstEpisodes) {
  Rollout rollout;
  rollout.over = at::tensor({0, 1, 0, 1, 0, 0, 0, 1, 1}, at::kLong).to(at::kBool).reshape({3, 3});
  EXPECT_NEAR(rollout.episode_length(), (2 + 1 + 3) / 3.0, 1e-9);
  rollout.over = at::zeros({3, 2}, at::kBool);
  EXPECT_NEAR(rollout.episode_length(), 3, 1e-9);
}

}  // namespace
}  // namespace cart_pole::program_test
