// Runs the example as users do, on images whose classes are easy to distinguish.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "fashion_mnist/synthetic.h"
#include "federated/options.h"
#include "tests/support/processes.h"

namespace federated::program_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class FederatedProgram : public ::testing::Test {
 protected:
  void SetUp() override { fashion_mnist::testing::write_dataset(folder_.path(), 320, 60); }

  std::pair<int, std::string> run(const std::vector<std::string>& launcher,
                                  const std::vector<std::string>& arguments) {
    std::vector<std::string> command = torchspan::testing::launched(launcher, "federated");
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
  static std::vector<double> accuracies_in(const std::string& output) {
    const std::regex line("round +[0-9]+: test accuracy +([0-9.]+) %");
    std::vector<double> accuracies;
    for (std::sregex_iterator found(output.begin(), output.end(), line), end; found != end; ++found)
      accuracies.push_back(std::stod((*found)[1]));
    return accuracies;
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

/// 320 images in 14 pieces: clients have 45 or 46 of them, so their weights differ.
TEST_F(FederatedProgram, IsGradientDescentWhenEveryClientTakesOneStepWithAllItsImages) {
  for (const char* workers : {"1", "4"}) {
    const auto [code, output] = run({"-n", workers}, {"--double", "--clients", "7", "--per-round", "7",
                                                      "--batch", "0", "--rounds", "3", "--lr", "0.1"});
    ASSERT_EQ(code, 0) << output;
    EXPECT_LT(number_in(output, "parameters differ by at most ([0-9.e+-]+)"), 1e-12) << output;
    EXPECT_EQ(accuracies_in(output).size(), 3U) << output;
  }
}

/// A client has seen only its classes, so it cannot classify more images than show them; together they can.
TEST_F(FederatedProgram, LearnsAllClassesFromClientsThatHaveTwo) {
  std::vector<double> first;
  for (const char* workers : {"1", "3"}) {
    const auto [code, output] =
        run({"-n", workers}, {"--clients", "10", "--per-round", "10", "--rounds", "8", "--batch", "8",
                              "--epochs", "2", "--lr", "0.03", "--seed", "3"});
    ASSERT_EQ(code, 0) << output;
    const std::vector<double> accuracies = accuracies_in(output);
    ASSERT_EQ(accuracies.size(), 8U) << output;
    const double share = number_in(output, "as ([0-9.]+) % of the test images do");
    EXPECT_LE(share, 40) << output;
    EXPECT_LE(number_in(output, "client 0 alone: ([0-9.]+) %"), share) << output;
    EXPECT_GT(accuracies.back(), share + 40) << output;
    EXPECT_THAT(output, AllOf(Not(HasSubstr("late")), Not(HasSubstr("gone"))));
    if (first.empty()) first = accuracies;
    EXPECT_EQ(accuracies, first) << "where the clients are does not matter";
  }
}

TEST_F(FederatedProgram, GoesOnWithoutClientsThatAreLateOrGoneAndTakesThemBack) {
  const auto [code, output] = run({"-n", "4", "--max-replacements", "2"},
                                  {"--clients", "9", "--per-round", "9", "--rounds", "7", "--batch", "8",
                                   "--slow-rank", "2", "--deadline", "2.5", "--die-at", "3", "--no-compare"});
  ASSERT_EQ(code, 0) << output;
  EXPECT_EQ(accuracies_in(output).size(), 7U) << output;
  EXPECT_THAT(output, AllOf(HasSubstr("client 1 on rank 2 is late, client 4 on rank 2 is late"),
                            HasSubstr("client 0 on rank 1 is gone"), Not(HasSubstr("on rank 3 is"))));
  EXPECT_THAT(output, HasSubstr("round   3: "));
  // Without worker1 and worker2, three clients are left; the new process of worker1 brings its three back.
  EXPECT_THAT(output, ::testing::ContainsRegex("round   3: [^\n]* 3 clients; client 0"));
  EXPECT_THAT(output, ::testing::ContainsRegex("round   7: [^\n]* 6 clients; client 1"));
}

TEST_F(FederatedProgram, ReportsInvalidOptions) {
  EXPECT_THAT(run({"-n", "2"}, {"--clients", "3"}).second, HasSubstr("--per-round 10: there are 3 clients"));
  EXPECT_THAT(run({"-n", "1"}, {"--clients", "400"}).second,
              HasSubstr("--clients 400 with --shards 2: there are only 320 images"));
  EXPECT_THAT(run({"-n", "1"}, {"--data", "/nowhere"}).second,
              HasSubstr("/nowhere/t10k-images-idx3-ubyte.gz"));
  const auto [code, output] = run({"-n", "3"}, {"--lr", "1e9"});
  EXPECT_NE(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("the loss of a client is not a finite number: lower --lr"));
}

TEST(FederatedOptions, FitEachOtherAndTheWorkers) {
  CLI::App app;
  Options options;
  add_options(app, options);
  EXPECT_THAT(app.help(), HasSubstr("--per-round"));
  options.clients = options.per_round = 2;
  EXPECT_NO_THROW(check(options, 2));
  try {
    check(options, 3);
    FAIL() << "two clients for three workers";
  } catch (const torchspan::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("--clients 2: each of the 3 workers needs one"));
  }
}

}  // namespace
}  // namespace federated::program_test
