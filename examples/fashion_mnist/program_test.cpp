// Runs the examples as users do, on images whose classes are easy to distinguish.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex>

#include <torch/cuda.h>

#include <torchspan/core/error.h>

#include "devices/devices.h"
#include "fashion_mnist/ddp_options.h"
#include "fashion_mnist/synthetic.h"
#include "tests/support/processes.h"

namespace fashion_mnist::program_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int exit_code;
  std::string output;
};

constexpr const char *kModelParallel = "fashion_mnist_model_parallel", *kDataParallel = "fashion_mnist_ddp";
constexpr const char* kLessTraffic = "fashion_mnist_less_traffic";
constexpr const char* kElastic = "fashion_mnist_elastic";
constexpr const char* kServed = "fashion_mnist_server";

class FashionMnistProgram : public ::testing::Test {
 protected:
  void SetUp() override { testing::write_dataset(folder_.path(), 320, 60); }

  Outcome run(const std::vector<std::string>& words, const std::vector<std::string>& arguments) {
    const std::string binaries = torchspan::testing::folder_of_programs();
    std::vector<std::string> command;
    for (const std::string& word : words) {
      if (word == "torchspan") {
        command.push_back(binaries + "/" + word);
      } else if (word.starts_with("fashion_mnist_")) {
        const auto started = torchspan::testing::ForkServer::words_of(binaries + "/" + word);
        command.insert(command.end(), started.begin(), started.end());
      } else {
        command.push_back(word);
      }
    }
    command.insert(command.end(), arguments.begin(), arguments.end());
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  Outcome run_workers(int count, const std::vector<std::string>& arguments,
                      const std::string& program = kModelParallel) {
    return run({"torchspan", "run", "-n", std::to_string(count), program}, arguments);
  }
  static double accuracy_in(const std::string& output) {
    std::smatch match;
    return std::regex_search(output, match, std::regex("test accuracy ([0-9.]+) %")) ? std::stod(match[1])
                                                                                     : -1;
  }

  /// Returns the error that `action` throws.
  static std::string refusal_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const torchspan::Error& error) {
      return error.what();
    }
    return "no error";
  }

  /// Returns the number in the pattern's group, for each match.
  static std::vector<double> numbers_in(const std::string& output, const std::string& pattern) {
    const std::regex regex(pattern);
    std::vector<double> numbers;
    for (std::sregex_iterator found(output.begin(), output.end(), regex), end; found != end; ++found)
      numbers.push_back(std::stod((*found)[1]));
    return numbers;
  }

  torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(FashionMnistProgram, LearnsAcrossThreeWorkersAndReportsThePlacementAndTheGraphOfAStep) {
  const std::string path = folder_.path() + "/step.dot";
  const Outcome outcome =
      run_workers(3, {"--data", folder_.path(), "--batch", "32", "--epochs", "3", "--graph", path});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_GE(accuracy_in(outcome.output), 90) << outcome.output;
  EXPECT_TRUE(std::regex_search(outcome.output, std::regex("worker1 +[0-9]+ +features +4848 +31 ")))
      << outcome.output;
  EXPECT_TRUE(std::regex_search(outcome.output, std::regex("worker2 +[0-9]+ +classifier +202122 +31 ")))
      << outcome.output;
  std::ifstream file(path);
  const std::string dot{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(dot, AllOf(HasSubstr("label=\"worker0\""), HasSubstr("label=\"worker1\""),
                         HasSubstr("label=\"worker2\""), HasSubstr("loss"),
                         HasSubstr("fashion_mnist_model_parallel.cpp:")));
}

TEST_F(FashionMnistProgram, GoesOnWhenARankDiesAndTakesInItsReplacement) {
  const Outcome outcome =
      run({"torchspan", "run", "-n", "3", "--max-replacements", "3", "--restart-backoff", "10ms", kElastic},
          {"--data", folder_.path(), "--batch", "16", "--epochs", "40", "--die-at", "30"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("step 0: 3 ranks"), HasSubstr("step 30: 2 ranks"),
                                    HasSubstr("800 steps, 40 epochs")));
  EXPECT_EQ(numbers_in(outcome.output, "step [0-9]+: ([0-9]) ranks").back(), 3) << outcome.output;
  EXPECT_GE(accuracy_in(outcome.output), 90) << outcome.output;
}

TEST_F(FashionMnistProgram, ServesEveryCallWhileItTrains) {
  for (const int workers : {1, 4}) {
    SCOPED_TRACE(workers);
    const Outcome outcome = run_workers(
        workers, {"--data", folder_.path(), "--batch", "16", "--epochs", "10", "--publish-every", "15"},
        kServed);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    const auto versions = numbers_in(outcome.output, "version +([0-9]+): ");
    const auto shares = numbers_in(outcome.output, "p99 [0-9.]+ ms, accuracy ([0-9.]+) %");
    ASSERT_EQ(versions.size(), shares.size()) << outcome.output;
    ASSERT_GE(versions.size(), 2u) << outcome.output;
    EXPECT_EQ(versions.front(), 0) << outcome.output;
    EXPECT_EQ(versions.back(), 14) << "200 steps\n" << outcome.output;
    EXPECT_LT(shares.front(), 50) << outcome.output;
    EXPECT_GE(shares.back(), 90) << outcome.output;
    EXPECT_THAT(outcome.output,
                HasSubstr(workers == 1 ? "worker0 answers one client" : "worker1 answers 2 clients"));
  }
}

TEST_F(FashionMnistProgram, GivesTheSameResultAloneAsAcrossThreeWorkers) {
  const std::vector<std::string> arguments = {"--data",      folder_.path(), "--batch",  "32",
                                              "--limit",     "160",          "--epochs", "1",
                                              "--optimizer", "adagrad",      "--seed",   "5"};
  const Outcome alone = run({kModelParallel}, arguments);
  const Outcome together = run_workers(3, arguments);
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  EXPECT_EQ(together.exit_code, 0) << together.output;
  EXPECT_GE(accuracy_in(alone.output), 0) << alone.output;
  EXPECT_EQ(accuracy_in(alone.output), accuracy_in(together.output)) << alone.output << together.output;
}

TEST_F(FashionMnistProgram, ResumesFromItsCheckpointWithTheSameResult) {
  const std::string checkpoints = folder_.path() + "/checkpoints";
  const auto arguments = [&](const char* epochs) {
    return std::vector<std::string>{"--data", folder_.path(), "--batch", "32", "--epochs", epochs};
  };
  const auto with_checkpoints = [&](const char* epochs) {
    auto all = arguments(epochs);
    all.insert(all.end(), {"--checkpoint", checkpoints});
    return all;
  };
  const Outcome once = run({kModelParallel}, arguments("2"));
  const Outcome first = run_workers(3, with_checkpoints("1"));
  const Outcome second = run_workers(2, with_checkpoints("2"));  // another number of workers
  EXPECT_EQ(once.exit_code, 0) << once.output;
  EXPECT_EQ(first.exit_code, 0) << first.output;
  EXPECT_EQ(second.exit_code, 0) << second.output;
  EXPECT_THAT(first.output, Not(HasSubstr("resumed")));
  EXPECT_THAT(second.output, HasSubstr("resumed after step 10"));
  EXPECT_GE(accuracy_in(once.output), 0) << once.output;
  EXPECT_EQ(accuracy_in(second.output), accuracy_in(once.output)) << second.output;
  const auto losses = numbers_in(once.output, "loss ([0-9.]+)"),
             resumed = numbers_in(second.output, "loss ([0-9.]+)");
  ASSERT_FALSE(losses.empty() || resumed.empty()) << second.output;
  EXPECT_EQ(resumed.back(), losses.back());
}

TEST_F(FashionMnistProgram, EndsEveryWorkerWithTheErrorWhenTheDataIsMissing) {
  const Outcome outcome = run_workers(3, {"--data", folder_.path() + "/nowhere"});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("nowhere/train-images-idx3-ubyte.gz"), HasSubstr("--data DIR"),
                                    Not(HasSubstr("test accuracy"))));
}

TEST_F(FashionMnistProgram, RejectsAWrongOptionBeforeItWaitsForOtherWorkers) {
  const Outcome outcome = run({kModelParallel}, {"--data", folder_.path(), "--lr", "-1"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("lr = -1"));
}

TEST_F(FashionMnistProgram, RejectsADeviceThatIsNotThere) {
  for (const char* program : {kModelParallel, kDataParallel}) {
    const Outcome outcome = run({program}, {"--data", folder_.path(), "--device", "gpu"});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.output, HasSubstr("--device gpu: give cpu, cuda or cuda:N"));
  }
  if (torch::cuda::is_available()) return;
  EXPECT_THAT(refusal_of([] { devices::of_rank("cuda", 0); }),
              HasSubstr("--device cuda: LibTorch finds no GPU"));
}

TEST_F(FashionMnistProgram, EndsEveryWorkerWithAnErrorWhenTheLossIsNotFinite) {
  const Outcome outcome =
      run_workers(3, {"--data", folder_.path(), "--batch", "32", "--epochs", "1", "--lr", "1e9"});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("the loss is not a finite number in epoch 1: lower --lr"),
                                    Not(HasSubstr("test accuracy"))));
}

// 161 images in batches of 32: each rank gets 11, 11 or 10 images, and the last batch of one image leaves the
// other ranks empty parts.
TEST_F(FashionMnistProgram, TrainsDataParallelAsOneProcessWouldHoweverABatchIsCut) {
  const std::vector<std::string> arguments = {"--data", folder_.path(), "--batch", "32", "--limit",  "161",
                                              "--lr",   "0.02",         "--seed",  "5",  "--epochs", "4"};
  const Outcome alone = run({kDataParallel}, arguments);
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  const std::vector<double> expected =
      numbers_in(alone.output, "one process: epoch [0-9]+, mean loss ([0-9.]+)");
  ASSERT_EQ(expected.size(), 4U) << alone.output;
  EXPECT_LT(expected[3], expected[0] - 0.1) << "it learned nothing, so there is nothing to compare";
  for (const int ranks : {1, 2, 3}) {
    const Outcome outcome = ranks == 1 ? alone : run_workers(ranks, arguments, kDataParallel);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    const std::vector<double> losses =
        numbers_in(outcome.output, std::to_string(ranks) + " ranks?: epoch [0-9]+, mean loss ([0-9.]+)");
    ASSERT_EQ(losses.size(), 4U) << outcome.output;
    for (std::size_t epoch = 0; epoch < 4; ++epoch)
      EXPECT_NEAR(losses[epoch], expected[epoch], 1e-4) << epoch;
    const std::vector<double> difference =
        numbers_in(outcome.output, "against one process: .* parameters .* by ([0-9.e+-]+)");
    ASSERT_EQ(difference.size(), 1U) << outcome.output;
    EXPECT_LT(difference[0], 1e-4) << outcome.output;
    EXPECT_EQ(numbers_in(outcome.output, "test accuracy ([0-9.]+) %").size(), 2U) << outcome.output;
  }
}

TEST_F(FashionMnistProgram, TrainsDataParallelAsOneProcessToTheRoundingOfDouble) {
  const Outcome outcome =
      run_workers(3, {"--data", folder_.path(), "--batch", "50", "--epochs", "2", "--lr", "0.02", "--double"},
                  kDataParallel);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string line = "against one process: losses differ by at most ([0-9.e+-]+), ";
  for (const std::string& pattern :
       {line, line.substr(0, line.find('(')) + ".* parameters .* by ([0-9.e+-]+)"}) {
    const std::vector<double> difference = numbers_in(outcome.output, pattern);
    ASSERT_EQ(difference.size(), 1U) << outcome.output;
    EXPECT_LT(difference[0], 1e-12) << outcome.output;
  }
}

TEST_F(FashionMnistProgram, TrainsDataParallelWithoutTheComparison) {
  const Outcome outcome = run_workers(
      2, {"--data", folder_.path(), "--batch", "32", "--epochs", "5", "--lr", "0.02", "--no-compare"},
      kDataParallel);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_GE(accuracy_in(outcome.output), 90) << outcome.output;
  EXPECT_THAT(outcome.output, Not(HasSubstr("one process")));
}

TEST_F(FashionMnistProgram, TrainsWithLessTraffic) {
  const Outcome outcome =
      run_workers(2,
                  {"--data", folder_.path(), "--batch", "31", "--epochs", "8", "--lr", "0.02", "--start",
                   "30", "--outer-period", "11", "--outer-momentum", "0.4"},
                  kLessTraffic);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::vector<double> accuracies = numbers_in(outcome.output, "test accuracy ([0-9.]+) %");
  const std::vector<double> sent = numbers_in(outcome.output, "([0-9.]+) MB sent");
  ASSERT_EQ(accuracies.size(), 4U) << outcome.output;
  ASSERT_EQ(sent.size(), 4U) << outcome.output;
  for (std::size_t method = 0; method < 4; ++method) {
    EXPECT_GE(accuracies[method], 80) << outcome.output;
    if (method > 0) {
      EXPECT_LT(sent[method], 0.7 * sent[0]) << outcome.output;
    }
  }
}

TEST_F(FashionMnistProgram, ReportsInvalidOptionsOfDataParallelTraining) {
  const auto output_of = [&](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"--data", folder_.path(), "--epochs", "1"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = run_workers(2, arguments, kDataParallel);
    EXPECT_NE(outcome.exit_code, 0) << outcome.output;
    return outcome.output;
  };
  EXPECT_THAT(output_of({"--batch", "1"}), HasSubstr("--batch 1 is less than the 2 ranks"));
  EXPECT_THAT(output_of({"--lr", "1e9"}),
              HasSubstr("the loss is not a finite number after epoch 1: lower --lr"));
  const auto checked = [](const std::string& arguments) {
    CLI::App app;
    DdpOptions options;
    add_options(app, options);
    app.parse(arguments);
    return refusal_of([&] { check(options, 2); });
  };
  EXPECT_THAT(checked("--lr nan"), HasSubstr("--lr nan: give a learning rate above 0"));
  EXPECT_THAT(checked("--momentum 1"), HasSubstr("--momentum 1: give a number from 0"));
  EXPECT_EQ(checked("--lr 0.1 --momentum 0.5"), "no error");
}

}  // namespace
}  // namespace fashion_mnist::program_test
