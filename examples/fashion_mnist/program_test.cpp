// The example as its users start it, on images whose classes are easy to see.
#include <chrono>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include "fashion_mnist/synthetic.h"
#include "tests/support/processes.h"

namespace fashion_mnist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int exit_code;
  std::string output;
};

class Program : public ::testing::Test {
 protected:
  void SetUp() override { testing::write_dataset(folder_.path(), 320, 60); }

  Outcome run(std::vector<std::string> command, const std::vector<std::string>& arguments) {
    const char* folder = std::getenv("TORCHSPAN_BIN_DIR");
    const std::string binaries = folder == nullptr ? "build/dev/bin" : folder;
    for (std::string& word : command) {
      if (word == "torchspan" || word == "fashion_mnist_model_parallel") word = binaries + "/" + word;
    }
    command.insert(command.end(), arguments.begin(), arguments.end());
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  Outcome run_workers(int count, const std::vector<std::string>& arguments) {
    return run({"torchspan", "run", "-n", std::to_string(count), "fashion_mnist_model_parallel"}, arguments);
  }
  static double accuracy_in(const std::string& output) {
    std::smatch match;
    return std::regex_search(output, match, std::regex("test accuracy ([0-9.]+) %")) ? std::stod(match[1])
                                                                                     : -1;
  }

  torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(Program, LearnsAcrossThreeWorkersAndTellsWhatRanWhere) {
  const Outcome outcome = run_workers(3, {"--data", folder_.path(), "--batch", "32", "--epochs", "3"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_GE(accuracy_in(outcome.output), 90) << outcome.output;
  EXPECT_TRUE(std::regex_search(outcome.output, std::regex("worker1 +[0-9]+ +features +4848 +31 ")))
      << outcome.output;
  EXPECT_TRUE(std::regex_search(outcome.output, std::regex("worker2 +[0-9]+ +classifier +202122 +31 ")))
      << outcome.output;
}

TEST_F(Program, GivesTheSameResultAloneAsAcrossThreeWorkers) {
  const std::vector<std::string> arguments = {"--data",      folder_.path(), "--batch",  "32",
                                              "--limit",     "160",          "--epochs", "1",
                                              "--optimizer", "adagrad",      "--seed",   "5"};
  const Outcome alone = run({"fashion_mnist_model_parallel"}, arguments);
  const Outcome together = run_workers(3, arguments);
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  EXPECT_EQ(together.exit_code, 0) << together.output;
  EXPECT_GE(accuracy_in(alone.output), 0) << alone.output;
  EXPECT_EQ(accuracy_in(alone.output), accuracy_in(together.output)) << alone.output << together.output;
}

TEST_F(Program, EndsEveryWorkerWithTheErrorWhenTheDataIsMissing) {
  const Outcome outcome = run_workers(3, {"--data", folder_.path() + "/nowhere"});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("nowhere/train-images-idx3-ubyte.gz"), HasSubstr("--data DIR"),
                                    Not(HasSubstr("test accuracy"))));
}

TEST_F(Program, RefusesAWrongOptionBeforeItWaitsForAnybody) {
  const Outcome outcome = run({"fashion_mnist_model_parallel"}, {"--data", folder_.path(), "--lr", "-1"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("lr = -1"));
}

}  // namespace
}  // namespace fashion_mnist
