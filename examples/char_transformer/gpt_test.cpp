// Runs gpt_pipeline as users do, on a text that repeats.
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <torchspan/core/error.h>

#include "char_transformer/example_program.h"
#include "char_transformer/model.h"
#include "tests/support/pipeline_world.h"

namespace char_transformer::gpt_test {
namespace {

using ::testing::HasSubstr;

class Gpt : public ExampleProgram {
 protected:
  Gpt()
      : ExampleProgram("gpt_pipeline",
                       {{"--width", "16"},
                        {"--heads", "2"},
                        {"--context", "16"},
                        {"--batch", "8"},
                        {"--steps", "40"},
                        {"--prompt", "call"},
                        {"--sample", "40"},
                        {"--micro-batches", "2"}},
                       "the whale, the white whale; call me ") {}
};

TEST_F(Gpt, LearnsTheSameOnAnyGridOfStagesAndReplicas) {
  // Dropout depends on the micro-batch, so the grids split the batch in the same four parts.
  const Outcome alone = run(1, {{"--micro-batches", "4"}});
  EXPECT_LT(loss_of(alone), 2.2) << "evenly guessed: 2.9\n" << alone.output;
  EXPECT_THAT(alone.output, HasSubstr("] call"));
  EXPECT_NEAR(loss_of(run(2, {{"--replicas", "2"}})), loss_of(alone), 0.01);
  const Outcome grid = run(4, {{"--replicas", "2"}});
  EXPECT_NEAR(loss_of(grid), loss_of(alone), 0.01);
  EXPECT_THAT(grid.output, HasSubstr("2 replicas of"));
  EXPECT_THAT(grid.output, HasSubstr("] call"));
}

TEST_F(Gpt, ResumesWithAnotherGrid) {
  const std::string state = folder_.path() + "/state";
  const double whole = loss_of(run(2, {{"--replicas", "2"}, {"--dropout", "0"}}));
  loss_of(run(4, {{"--replicas", "2"}, {"--dropout", "0"}, {"--steps", "20"}, {"--checkpoint", state}}));
  const Outcome resumed = run(2, {{"--dropout", "0"}, {"--checkpoint", state}});
  EXPECT_THAT(resumed.output, HasSubstr("resumed after step 20"));
  EXPECT_NEAR(loss_of(resumed), whole, 1e-2);
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
  EXPECT_THAT(refusal(3, {{"--replicas", "2"}}), HasSubstr("3 workers cannot be divided into 2 replicas"));
  EXPECT_THAT(refusal(2, {{"--blocks", "1"}}), HasSubstr("2 stages cannot share 1 blocks"));
  EXPECT_THAT(refusal(2, {{"--replicas", "2"}, {"--batch", "1"}}),
              HasSubstr("--batch 1 has no row for each of 2 replicas"));
}

/// The parameters of a GPT in double after some steps on a grid, by layer and name.
std::map<std::string, at::Tensor> train_in_double(int workers, int replicas, int micro_batches) {
  namespace ts = torchspan;
  const ModelOptions model{
      .vocabulary = 11, .width = 8, .blocks = 3, .heads = 2, .context = 6, .tied = true, .copies = true};
  std::vector<std::map<std::string, at::Tensor>> by_rank(static_cast<std::size_t>(workers));
  ts::testing::on_workers(workers, 1, [&](ts::Worker& worker) {
    ts::Pipeline pipe(worker, layers(model),
                      {.balance = balance(model, workers / replicas),
                       .replicas = replicas,
                       .micro_batches = micro_batches,
                       .schedule = ts::Schedule::kZBH1,
                       .checkpoint = ts::ActivationCheckpoint::kNever,
                       .seed = 3});
    auto& mine = by_rank[static_cast<std::size_t>(worker.rank())];
    for (int layer = 0; layer < static_cast<int>(pipe.plan().layers.size()); ++layer) {
      const auto module = pipe.module(layer);
      if (!module) continue;
      module->to(at::kDouble);
      for (const auto& item : module->named_parameters())
        mine[std::to_string(layer) + "." + item.key()] = item.value();
    }
    torch::optim::AdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(0.003));
    for (std::uint64_t step = 0; step < 10; ++step) {
      const at::Tensor text = at::randint(11, {8, 7}, at::detail::createCPUGenerator(step), at::kLong);
      const at::Tensor part = text.tensor_split(replicas)[static_cast<std::size_t>(pipe.replica())];
      optimizer.zero_grad();
      pipe.train_step(part.narrow(1, 0, 6), part.narrow(1, 1, 6), loss);
      pipe.clip_grad_norm(1.0);
      optimizer.step();
    }
  });
  std::map<std::string, at::Tensor> all;
  for (const auto& mine : by_rank) all.insert(mine.begin(), mine.end());
  return all;
}

// In float, the weights of two grids differ more: the gradient of the keys' biases is zero up to rounding, which AdamW
// scales to steps of up to the learning rate. They do not change the outputs.
TEST(GptWeights, AreEqualInDoubleOnAGridAndInOneProcess) {
  const auto alone = train_in_double(1, 1, 4);
  for (const auto& [workers, replicas] : {std::pair{4, 2}, std::pair{2, 1}, std::pair{2, 2}}) {
    SCOPED_TRACE(std::to_string(workers) + " workers, " + std::to_string(replicas) + " replicas");
    const auto grid = train_in_double(workers, replicas, 4 / replicas);
    ASSERT_EQ(grid.size(), alone.size());
    for (const auto& [name, parameter] : alone)
      EXPECT_LE((grid.at(name) - parameter).abs().max().item<double>(), 1e-10) << name;
  }
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
