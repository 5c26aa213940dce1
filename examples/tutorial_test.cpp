// Runs the program of docs/tutorial.md as its reader does.
#include <chrono>
#include <cstdlib>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/processes.h"

namespace tutorial::tutorial_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Tutorial : public ::testing::Test {
 protected:
  std::string run(int ranks, const std::string& checkpoints, int steps, int exit_code = 0) {
    std::vector<std::string> command =
        torchspan::testing::launched({"-n", std::to_string(ranks)}, "tutorial");
    if (!checkpoints.empty()) command.insert(command.end(), {checkpoints, std::to_string(steps)});
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    EXPECT_EQ(process.exit_code(), exit_code) << process.output();
    return process.output();
  }
  static double share_of(const std::string& output) {
    std::smatch match;
    return std::regex_search(output, match, std::regex("ranks: +([0-9.]+) % right")) ? std::stod(match[1])
                                                                                     : -1;
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(Tutorial, ReachesTheSameOnAnyNumberOfRanks) {
  const double one = share_of(run(1, folder_.path() + "/one", 1000));
  EXPECT_GT(one, 80);
  EXPECT_NEAR(share_of(run(3, folder_.path() + "/three", 1000)), one, 3);
}

TEST_F(Tutorial, ResumesFromItsCheckpoint) {
  const std::string checkpoints = folder_.path() + "/checkpoints";
  EXPECT_THAT(run(2, checkpoints, 500), Not(HasSubstr("resumed")));
  EXPECT_THAT(run(2, checkpoints, 600), HasSubstr("resumed after step 500"));
}

TEST_F(Tutorial, SaysHowItIsCalled) {
  EXPECT_THAT(run(1, "", 0, 2), HasSubstr("usage: tutorial CHECKPOINTS"));
}

}  // namespace
}  // namespace tutorial::tutorial_test
