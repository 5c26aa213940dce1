// Runs gpt_sharded as users do, on a text that repeats, with little memory.
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <regex>

#include <torchspan/core/error.h>

#include "tests/support/processes.h"

namespace char_transformer::sharded_test {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int exit_code;
  std::string output;
};

class GptSharded : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream file(folder_.path() + "/text");
    for (int i = 0; i < 60; ++i) file << "the whale, the white whale; call me " << i % 10 << "\n";
  }
  /// 25 million parameters: 400 MiB with gradients and the state of Adam.
  Outcome run(int workers, const std::map<std::string, std::string>& arguments) {
    const char* folder = std::getenv("TORCHSPAN_BIN_DIR");
    const std::string binaries = folder == nullptr ? "build/dev/bin" : folder;
    std::vector<std::string> command = {binaries + "/torchspan", "run", "-n", std::to_string(workers),
                                        binaries + "/gpt_sharded"};
    std::map<std::string, std::string> all = {{"--text", folder_.path() + "/text"},
                                              {"--width", "256"},
                                              {"--blocks", "32"},
                                              {"--heads", "4"},
                                              {"--context", "16"},
                                              {"--batch", "4"},
                                              {"--steps", "4"}};
    for (const auto& [name, value] : arguments) all[name] = value;
    for (const auto& [name, value] : all) {
      command.push_back(name);
      if (!value.empty()) command.push_back(value);
    }
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  static double loss_of(const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::smatch match;
    const bool found = std::regex_search(outcome.output, match, std::regex("not trained on: ([0-9.]+)"));
    return found ? std::stod(match[1]) : std::nan("");
  }

  torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(GptSharded, TrainsOnTwoRanksWhatDoesNotFitOne) {
  const double whole = loss_of(run(1, {}));
  const Outcome one = run(1, {{"--memory", "340"}});
  EXPECT_NE(one.exit_code, 0);
  EXPECT_THAT(one.output, HasSubstr("a world of 1 needs more than 340 MiB for each rank: start more ranks"));
  EXPECT_NEAR(loss_of(run(2, {{"--memory", "340"}})), whole, 0.01);
}

TEST_F(GptSharded, ComputesInBfloat16) {
  EXPECT_NEAR(loss_of(run(2, {{"--blocks", "2"}, {"--bfloat16", ""}})), loss_of(run(2, {{"--blocks", "2"}})),
              0.2);
}

TEST_F(GptSharded, ReportsInvalidOptions) {
  EXPECT_THAT(run(2, {{"--batch", "3"}}).output, HasSubstr("--batch 3 is not a multiple of 2 ranks"));
}

}  // namespace
}  // namespace char_transformer::sharded_test
