// Runs gpt_pipeline as users do, on a text that repeats.
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <regex>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "char_transformer/model.h"
#include "tests/support/processes.h"

namespace char_transformer::gpt_test {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int exit_code;
  std::string output;
};

class Gpt : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream file(folder_.path() + "/text");
    for (int i = 0; i < 60; ++i) file << "the whale, the white whale; call me " << i % 10 << "\n";
  }
  Outcome run(int workers, const std::map<std::string, std::string>& arguments) {
    const char* folder = std::getenv("TORCHSPAN_BIN_DIR");
    const std::string binaries = folder == nullptr ? "build/dev/bin" : folder;
    std::vector<std::string> command = {binaries + "/torchspan", "run", "-n", std::to_string(workers),
                                        binaries + "/gpt_pipeline"};
    std::map<std::string, std::string> all = {{"--text", folder_.path() + "/text"},
                                              {"--width", "16"},
                                              {"--heads", "2"},
                                              {"--context", "16"},
                                              {"--batch", "8"},
                                              {"--steps", "40"},
                                              {"--prompt", "call"},
                                              {"--sample", "40"},
                                              {"--micro-batches", "2"}};
    for (const auto& [name, value] : arguments) all[name] = value;
    for (const auto& [name, value] : all) {
      command.push_back(name);
      if (!value.empty()) command.push_back(value);
    }
    torchspan::testing::Process process(command, {{"OMP_NUM_THREADS", "1"}}, folder_.path() + "/output");
    EXPECT_TRUE(process.wait(*executor_, std::chrono::seconds(120))) << process.output();
    return {process.exit_code(), process.output()};
  }
  static double loss_of_run(const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::smatch match;
    const bool found = std::regex_search(outcome.output, match, std::regex("not trained on: ([0-9.]+)"));
    return found ? std::stod(match[1]) : std::nan("");
  }

  torchspan::testing::TemporaryFolder folder_;
  const std::unique_ptr<torchspan::Executor> executor_ = torchspan::make_executor();
};

TEST_F(Gpt, LearnsTheSameOnAnyGridOfStagesAndReplicas) {
  // Dropout depends on the micro-batch, so the grids split the batch in the same four parts.
  const Outcome alone = run(1, {{"--micro-batches", "4"}});
  EXPECT_LT(loss_of_run(alone), 2.2) << "evenly guessed: 2.9\n" << alone.output;
  EXPECT_THAT(alone.output, HasSubstr("] call"));
  EXPECT_NEAR(loss_of_run(run(2, {{"--replicas", "2"}})), loss_of_run(alone), 0.01);
  const Outcome grid = run(4, {{"--replicas", "2"}});
  EXPECT_NEAR(loss_of_run(grid), loss_of_run(alone), 0.01);
  EXPECT_THAT(grid.output, HasSubstr("2 replicas of"));
  EXPECT_THAT(grid.output, HasSubstr("] call"));
}

TEST_F(Gpt, ResumesWithAnotherGrid) {
  const std::string state = folder_.path() + "/state";
  const double whole = loss_of_run(run(2, {{"--replicas", "2"}, {"--dropout", "0"}}));
  loss_of_run(run(4, {{"--replicas", "2"}, {"--dropout", "0"}, {"--steps", "20"}, {"--checkpoint", state}}));
  const Outcome resumed = run(2, {{"--dropout", "0"}, {"--checkpoint", state}});
  EXPECT_THAT(resumed.output, HasSubstr("resumed after step 20"));
  EXPECT_NEAR(loss_of_run(resumed), whole, 1e-2);
}

TEST_F(Gpt, WritesTheSameWithACacheAtEachStage) {
  // Beyond the context the cache begins again with fewer characters, so the texts end before.
  std::map<std::string, std::string> arguments = {{"--sample", "11"}, {"--texts", "3"}, {"--steps", "20"}};
  const auto text_of = [](const Outcome& outcome) {
    const std::size_t begin = std::min(outcome.output.find("] call"), outcome.output.size());
    return outcome.output.substr(begin, outcome.output.find('\n', begin) - begin);
  };
  const Outcome alone = run(1, arguments), stages = run(2, arguments);
  arguments["--no-cache"] = "";
  const Outcome again = run(2, arguments);
  EXPECT_EQ(text_of(stages), text_of(again));
  EXPECT_GE(text_of(stages).size(), 16u) << stages.output;
  EXPECT_THAT(alone.output, HasSubstr("3 x 11 characters: "));
}

TEST_F(Gpt, ReportsInvalidOptions) {
  EXPECT_THAT(run(3, {{"--replicas", "2"}}).output, HasSubstr("3 workers cannot be divided into 2 replicas"));
  EXPECT_THAT(run(2, {{"--blocks", "1"}}).output, HasSubstr("2 stages cannot share 1 blocks"));
  EXPECT_THAT(run(2, {{"--replicas", "2"}, {"--batch", "1"}}).output,
              HasSubstr("--batch 1 has no row for each of 2 replicas"));
}

TEST(Block, ContinuesWithACacheAsIfItSawTheWholeText) {
  const ModelOptions options{.vocabulary = 7, .width = 8, .heads = 2, .context = 12, .dropout = 0};
  Embedding embedding(options);
  Block block(options, 1);
  using torchspan::pipeline::LayerCache;
  LayerCache none;
  const at::Tensor text = at::arange(10, at::kLong).remainder(7).unsqueeze(0);
  const at::Tensor whole = block->forward(embedding->forward(text, none), none);
  std::vector<at::Tensor> places, kept;
  LayerCache embedding_state(places), block_state(kept);
  std::vector<at::Tensor> pieces;
  std::int64_t at = 0;
  for (const std::int64_t length : {4, 1, 3, 2}) {
    const at::Tensor piece = text.narrow(1, at, length);
    pieces.push_back(block->forward(embedding->forward(piece, embedding_state), block_state));
    at += length;
  }
  EXPECT_TRUE(at::allclose(at::cat(pieces, 1), whole, 1e-5, 1e-6));
}

}  // namespace
}  // namespace char_transformer::gpt_test
