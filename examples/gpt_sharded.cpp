// Trains a small GPT whose parameters, gradients and optimizer state are divided among the ranks, under a limit of
// memory for each rank: a model that does not fit one rank trains on two.
//   tools/fetch-data fortunes.txt
//   torchspan run -n 1 gpt_sharded --memory 450      fails: it needs more memory
//   torchspan run -n 2 gpt_sharded --memory 450
// The blocks are built one at a time, each divided at once, so that no rank ever has the whole model.
#include <fmt/format.h>
#include <string>
#include <vector>

#include <torch/types.h>
#include <torch/utils.h>

#include <torchspan/core/error.h>
#include <torchspan/core/observation.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>
#include <torchspan/torchspan.h>

#include "char_transformer/memory.h"
#include "char_transformer/model.h"
#include "char_transformer/sharded_options.h"
#include "char_transformer/text.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace char_transformer;

namespace {

/// The embedding, the blocks and the head are units.
struct GptImpl : torch::nn::Module {
  GptImpl(ts::UnitBuilder& builder, const ModelOptions& options) {
    embedding = register_module("embedding", builder.build<Embedding>(options));
    for (std::int64_t number = 1; number <= options.blocks; ++number) {
      blocks.push_back(
          register_module("block" + std::to_string(number), builder.build<Block>(options, number)));
    }
    head = register_module("head", builder.build<Head>(options));
  }
  at::Tensor forward(const at::Tensor& characters) {
    ts::pipeline::LayerCache none;
    at::Tensor x = embedding->forward(characters, none);
    for (auto& block : blocks) x = block->forward(x, none);
    return head->forward(x);
  }

  ts::Sharded<Embedding> embedding{nullptr};
  std::vector<ts::Sharded<Block>> blocks;
  ts::Sharded<Head> head{nullptr};
};
TORCH_MODULE(Gpt);

ts::FullyShardedOptions wrapper_options(const ShardedOptions& options) {
  ts::FullyShardedOptions wrapper;
  if (options.bfloat16) wrapper.precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat};
  return wrapper;
}

void report(ts::Progress& progress, std::int64_t step, std::int64_t steps, double loss) {
  ts::ProgressReport line;
  line.step = step;
  line.steps = steps;
  line.loss = loss;
  progress.report(line);
}

void train(ts::Session& session, const ShardedOptions& options, const Text& text) {
  ts::UnitBuilder builder(session.group(), wrapper_options(options));
  Gpt net(builder, options.model);
  ts::FullyShardedDataParallel<Gpt> model(net, builder);
  ts::optim::Optimizer adam(*net, ts::optim::AdamW({.lr = options.lr}));
  const bool is_first = session.rank() == 0;
  const auto loss_of = [&](std::uint64_t seed, bool held_out) {
    const auto windows = text.windows(options.batch, options.model.context, seed, held_out);
    const auto part = [&](const at::Tensor& all) {
      return all.tensor_split(session.world_size())[static_cast<std::size_t>(session.rank())];
    };
    return loss(model(part(windows.characters)), part(windows.next));
  };
  ts::Progress progress(session);
  for (std::int64_t step = 0; step < options.steps; ++step) {
    adam.zero_grad();
    const at::Tensor error = loss_of(static_cast<std::uint64_t>(step), false);
    error.backward();
    model.clip_grad_norm(1.0);
    adam.step();
    if (is_first) report(progress, step + 1, options.steps, error.item<double>());
  }
  progress.finish();
  const torch::NoGradGuard no_grad;
  net->eval();
  at::Tensor held_out = loss_of(1'000'000, true).detach();
  session.group().all_reduce(held_out, ts::collective::kAvg).wait();
  if (!is_first) return;
  const auto stats = model.stats();
  fmt::print("{} ranks: {} MiB of parameters on each, at most {} MiB gathered at a time\n",
             session.world_size(), stats.part_bytes >> 20, stats.peak_bytes >> 20);
  fmt::print("largest memory of a rank: {} MiB\n", largest_memory());
  fmt::print("loss on text not trained on: {:.3f}\n", held_out.item<double>());
}

void run(ShardedOptions options) {
  const auto worker_options = ts::WorkerOptions::from_env();
  check(options, worker_options.environment.world_size);
  const Text text = Text::load(options.text, options.model.context);
  options.model.vocabulary = text.vocabulary();
  ts::Session session(worker_options);
  limit_memory(options.memory);
  try {
    train(session, options, text);
  } catch (const std::exception& error) {
    // LibTorch's message, of this rank or of another one.
    if (std::string(error.what()).find("allocate memory") == std::string::npos) throw;
    throw ts::Error(
        ts::ErrorKind::kInvalid,
        fmt::format("a world of {} needs more than {} MiB for each rank: start more ranks, or give more "
                    "--memory",
                    session.world_size(), options.memory));
  }
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<ShardedOptions>(
      "gpt_sharded",
      "Trains a small GPT that is divided among the ranks, which need not have memory for all of it.", argc,
      argv, add_options, run);
}
