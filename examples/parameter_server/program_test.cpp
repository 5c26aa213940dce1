// Runs the example as users do, on images whose classes are easy to distinguish.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include "fashion_mnist/synthetic.h"
#include "parameter_server/training.h"
#include "tests/support/processes.h"

namespace parameter_server::program_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ParameterServerProgram : public ::testing::Test {
 protected:
  void SetUp() override { fashion_mnist::testing::write_dataset(folder_.path(), 320, 60); }

  std::pair<int, std::string> run(int workers, const std::vector<std::string>& arguments) {
    std::vector<std::string> command =
        torchspan::testing::launched({"-n", std::to_string(workers)}, "parameter_server");
    if (!std::ranges::count(arguments, "--data")) command.insert(command.end(), {"--data", folder_.path()});
    command.insert(command.end(), arguments.begin(), arguments.end());
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  static double number_in(const std::string& output, const std::string& pattern) {
    std::smatch match;
    return std::regex_search(output, match, std::regex(pattern)) ? std::stod(match[1]) : NAN;
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

/// 51 images divide into 17 for each of three trainers, and 26 and 25 for two; the last batch has 14.
TEST_F(ParameterServerProgram, TrainsAsOneProcessWouldWhenItWaitsForAllTrainers) {
  for (const int workers : {1, 3, 4}) {
    SCOPED_TRACE(workers);
    const auto [code, output] = run(workers, {"--double", "--batch", "51", "--epochs", "4", "--lr", "0.02"});
    ASSERT_EQ(code, 0) << output;
    const int trainers = std::max(1, workers - 1);
    EXPECT_THAT(output, HasSubstr(fmt::format("{} of {} trainers make a step", trainers, trainers)));
    EXPECT_THAT(output, HasSubstr(fmt::format("28 steps with {} gradients", 28 * trainers)));
    EXPECT_LT(number_in(output, "its parameters differ by at most ([0-9.e+-]+)"), 1e-10) << output;
    EXPECT_EQ(number_in(output, "\\] test accuracy ([0-9.]+) %"),
              number_in(output, "one process: test accuracy ([0-9.]+) %"))
        << output;
    EXPECT_EQ(number_in(output, "the server took ([0-9.]+) other steps"), 0) << output;
  }
}

TEST_F(ParameterServerProgram, LearnsAndEndsWhenStepsDoNotWaitForAllTrainers) {
  for (const int wait_for : {1, 2}) {
    // Momentum and late gradients together would be unstable in some of the schedules.
    const auto [code, output] = run(4, {"--batch", "48", "--epochs", "12", "--lr", "0.02", "--momentum", "0",
                                        "--wait-for", std::to_string(wait_for), "--no-compare"});
    ASSERT_EQ(code, 0) << output;
    // 7 batches in an epoch. When only one trainer is left, its gradient alone makes a step.
    EXPECT_THAT(output, HasSubstr(fmt::format("with {} gradients", 12 * 7 * 3)));
    EXPECT_GE(number_in(output, "\\] ([0-9]+) steps with"), 12 * 7 * 3 / wait_for) << output;
    EXPECT_GE(number_in(output, "test accuracy ([0-9.]+) %"), 90) << output;
    EXPECT_THAT(output, Not(HasSubstr("one process")));
  }
}

TEST_F(ParameterServerProgram, ReportsInvalidOptions) {
  EXPECT_THAT(run(2, {"--wait-for", "2"}).second,
              HasSubstr("--wait-for 2 and --batch 128 do not fit 1 trainers"));
  EXPECT_THAT(run(3, {"--batch", "1"}).second, HasSubstr("--batch 1 do not fit 2 trainers"));
  EXPECT_THAT(run(1, {"--data", "/nowhere"}).second, HasSubstr("/nowhere/t10k-images-idx3-ubyte.gz"));
  CLI::App app;
  Options options;
  add_options(app, options);
  EXPECT_THAT(app.help(), HasSubstr("--wait-for"));
  EXPECT_THROW(app.parse("--momentum 1"), CLI::ValidationError);
  EXPECT_NO_THROW(app.parse("--momentum 0.99"));
}

TEST_F(ParameterServerProgram, EndsEveryWorkerWithAnErrorWhenTheLossIsNotFinite) {
  const auto [code, output] = run(3, {"--lr", "1e9"});
  EXPECT_NE(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("the loss is not a finite number: lower --lr"));
  EXPECT_THAT(output, Not(HasSubstr("test accuracy")));
}

}  // namespace
}  // namespace parameter_server::program_test
