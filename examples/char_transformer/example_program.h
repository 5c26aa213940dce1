#pragma once
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/processes.h"

namespace char_transformer {

/// Runs an example as users do, under `torchspan run`, on a text that repeats.
class ExampleProgram : public ::testing::Test {
 protected:
  using Arguments = std::map<std::string, std::string>;  ///< options with their values; "" for a flag
  struct Outcome {
    int exit_code;
    std::string output;
  };

  /// `always` are the arguments of each run. Each line of the text is `line` and a number.
  ExampleProgram(std::string program, Arguments always, const std::string& line)
      : program_(std::move(program)), always_(std::move(always)) {
    always_["--text"] = text();
    std::ofstream file(text());
    for (int i = 0; i < 60; ++i) file << line << i % 10 << "\n";
  }

  std::string text() const { return folder_.path() + "/text"; }

  Outcome run(int workers, const Arguments& arguments) const {
    return run(torchspan::testing::launched({"-n", std::to_string(workers)}, program_),
               {{"OMP_NUM_THREADS", "1"}}, arguments);
  }
  /// What rank 0 of a world prints when it refuses its arguments before it waits for the other ranks, which do not exist.
  std::string refusal(int workers, const Arguments& arguments) const {
    const Outcome outcome = run(
        torchspan::testing::ForkServer::words_of(torchspan::testing::folder_of_programs() + "/" + program_),
        torchspan::testing::first_rank_of(workers), arguments);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    return outcome.output;
  }
  /// The loss that a successful run prints.
  static double loss_of(const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::smatch match;
    const bool found = std::regex_search(outcome.output, match, std::regex("not trained on: ([0-9.]+)"));
    return found ? std::stod(match[1]) : std::nan("");
  }

  const torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();

 private:
  Outcome run(std::vector<std::string> command, const std::map<std::string, std::string>& variables,
              const Arguments& arguments) const {
    Arguments all = always_;
    for (const auto& [name, value] : arguments) all[name] = value;
    for (const auto& [name, value] : all) {
      command.push_back(name);
      if (!value.empty()) command.push_back(value);
    }
    torchspan::testing::Process process(command, variables, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }

  const std::string program_;
  Arguments always_;
};

}  // namespace char_transformer
