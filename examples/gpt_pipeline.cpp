// Trains a small GPT on the quotations of the fortune program: its blocks are spread over stages, and each stage has
// replicas that train on different rows (pipeline × data parallelism). Then it writes a text.
//   tools/fetch-data fortunes.txt
//   torchspan run -n 4 gpt_pipeline --replicas 2
// The output layer has a copy of the embedding's matrix on the last stage, tied to the first. With --checkpoint, it
// resumes from the newest state, also with other numbers of replicas and of stages (one stage cannot resume several).
// All grids train the same weights, up to the rounding of sums: in double, they are equal to 1e-10 after ten steps.
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <optional>
#include <string>

#include <torch/types.h>
#include <torch/utils.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline.h>
#include <torchspan/torchspan.h>

#include "char_transformer/generate.h"
#include "char_transformer/gpt_options.h"
#include "char_transformer/model.h"
#include "char_transformer/text.h"
#include "char_transformer/training_progress.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace char_transformer;

namespace {

ts::PipelineOptions pipeline_options(const GptOptions& options, int world_size) {
  return {.balance = balance(options.model, world_size / options.replicas),
          .replicas = options.replicas,
          .micro_batches = options.micro_batches,
          .schedule = ts::Schedule::kZBH1,
          .checkpoint = ts::ActivationCheckpoint::kNever,
          .seed = options.model.seed};
}

/// The program that every worker runs.
class Training {
 public:
  Training(ts::Session& session, const GptOptions& options, const Text& text)
      : session_(session),
        options_(options),
        text_(text),
        pipe_(session.worker(), layers(options.model), pipeline_options(options, session.world_size())),
        optimizer_({ts::optim::ParamGroup(pipe_.parameters(), ts::optim::AdamW{.lr = options.lr},
                                          pipe_.parameter_names())}) {}

  void run() {
    if (is_first()) fmt::print("{} replicas of\n{}", options_.replicas, ts::pipeline::to_text(pipe_.plan()));
    const std::int64_t first = restore();
    TrainingProgress progress(session_, options_, first);
    for (std::int64_t step = first; step < options_.steps; ++step) {
      optimizer_.zero_grad();
      const double loss = step_on(static_cast<std::uint64_t>(step), false);
      if (!std::isfinite(loss))
        throw ts::Error(ts::ErrorKind::kInvalid,
                        fmt::format("the loss is not a finite number in step {}: lower --lr", step));
      pipe_.clip_grad_norm(1.0);
      optimizer_.step();
      if (options_.saves_after(step + 1)) manager_->save(step + 1);
      progress.step(step + 1, loss);
    }
    progress.finish();
    if (manager_) manager_->wait();
    const double held_out = validate();
    if (is_first()) fmt::print("loss on text not trained on: {:.3f}\n", held_out);
    write_texts(session_, pipe_, text_, options_);
  }

 private:
  bool is_first() const { return session_.rank() == 0; }
  /// Returns the number of steps that the restored state has made.
  std::int64_t restore() {
    if (options_.checkpoint.empty()) return 0;
    manager_.emplace(session_, ts::CheckpointOptions{.directory = options_.checkpoint});
    manager_->add("pipe", pipe_);
    manager_->add("optimizer", optimizer_);
    const std::int64_t step = manager_->restore_or(0);
    if (is_first() && step > 0) fmt::print("resumed after step {}\n", step);
    return step;
  }
  /// Each replica trains on its part of the batch.
  double step_on(std::uint64_t seed, bool held_out) {
    const auto windows = text_.windows(options_.batch, options_.model.context, seed, held_out);
    const auto part = [this](const at::Tensor& all) {
      return all.tensor_split(options_.replicas)[static_cast<std::size_t>(pipe_.replica())];
    };
    return pipe_.train_step(part(windows.characters), part(windows.next), loss);
  }
  double validate() {
    const torch::NoGradGuard no_grad;
    pipe_.eval();
    double sum = 0;
    for (std::uint64_t batch = 0; batch < 10; ++batch) sum += step_on(1'000'000 + batch, true);
    return sum / 10;
  }

  ts::Session& session_;
  const GptOptions& options_;
  const Text& text_;
  ts::Pipeline pipe_;
  ts::optim::Optimizer optimizer_;
  std::optional<ts::CheckpointManager> manager_;
};

void run(GptOptions options) {
  // Detects wrong options, such as a missing text, before it waits for the other workers.
  const auto worker_options = ts::WorkerOptions::from_env();
  check(options, worker_options.environment.world_size);
  const Text text = Text::load(options.text, options.model.context);
  options.model.vocabulary = text.vocabulary();
  text.encode(options.prompt);
  ts::Session session(worker_options);
  Training(session, options, text).run();
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<GptOptions>(
      "gpt_pipeline", "Trains a small GPT with pipeline and data parallelism, and writes a text.", argc, argv,
      add_options, run);
}
