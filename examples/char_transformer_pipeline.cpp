// Trains a small GPT on the quotations of the fortune program, with its blocks distributed over worker processes:
//   tools/fetch-data fortunes.txt
//   torchspan run -n 2 char_transformer_pipeline
// Micro-batches flow through the stages, and a backward runs as soon as one is ready (1F1B). With --tied, the
// embedding's matrix, which lives on the first worker, also computes the scores; with a zero-bubble schedule, the head
// has a copy of it instead, and both get the sum of their gradients.
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <optional>
#include <string>

#include <torch/types.h>
#include <torch/utils.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline.h>
#include <torchspan/torchspan.h>

#include "char_transformer/drawing.h"
#include "char_transformer/generate.h"
#include "char_transformer/model.h"
#include "char_transformer/stage_options.h"
#include "char_transformer/text.h"
#include "char_transformer/training_progress.h"
#include "devices/devices.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace char_transformer;

namespace {

ts::PipelineOptions pipeline_options(const StageOptions& options, int workers) {
  return {.balance = balance(options.model, options.stages(workers)),
          .micro_batches = options.micro_batches,
          .schedule = options.schedule_kind(),
          .checkpoint = ts::ActivationCheckpoint::kNever,
          .seed = options.model.seed};  // the same dropout on any number of workers
}

void expect_finite(double loss, const std::string& what, std::int64_t step) {
  if (std::isfinite(loss)) return;
  throw ts::Error(ts::ErrorKind::kInvalid,
                  fmt::format("{} is not a finite number after step {}: lower --lr", what, step));
}

/// The program that every worker runs.
class Training {
 public:
  Training(ts::Session& session, const StageOptions& options, const Text& text)
      : session_(session),
        options_(options),
        text_(text),
        pipe_(session.worker(), layers(options.model), pipeline_options(options, session.world_size())),
        optimizer_({ts::optim::ParamGroup(pipe_.parameters(), ts::optim::AdamW{.lr = options.lr},
                                          pipe_.parameter_names())}) {}

  void run() {
    if (is_first()) fmt::print("{}", ts::pipeline::to_text(pipe_.plan()));
    const std::int64_t first = restore();
    TrainingProgress progress(session_, options_, first);
    for (std::int64_t step = first; step < options_.steps; ++step) {
      optimizer_.zero_grad();
      const double loss = step_on(static_cast<std::uint64_t>(step), false);
      optimizer_.step();
      expect_finite(loss, "the loss", step);
      if (options_.saves_after(step + 1)) manager_->save(step + 1);
      progress.step(step + 1, loss);
    }
    if (manager_) manager_->wait();
    progress.finish();
    if (is_first() && !options_.drawing.empty()) draw_last_step(pipe_, options_.drawing);
    const double held_out = validate();
    expect_finite(held_out, "the loss on text not trained on", options_.steps - 1);
    if (is_first()) {
      fmt::print("{}\n", progress.summary());
      fmt::print("loss on text not trained on: {:.3f} (uniform guess: {:.3f})\n", held_out,
                 std::log(static_cast<double>(text_.vocabulary())));
    }
    write_sample();
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
  double step_on(std::uint64_t seed, bool held_out) {
    const auto windows = text_.windows(options_.batch, options_.model.context, seed, held_out);
    return pipe_.train_step(windows.characters, windows.next, loss);
  }
  double validate() {
    constexpr std::uint64_t kBatches = 10;
    const torch::NoGradGuard no_grad;
    pipe_.eval();
    double sum = 0;
    for (std::uint64_t batch = 0; batch < kBatches; ++batch) sum += step_on(1'000'000 + batch, true);
    return sum / kBatches;
  }
  void write_sample() {
    const auto written = generate(session_, pipe_, text_, options_.prompt,
                                  {options_.sample, options_.model.context, options_.model.seed});
    if (is_first() && options_.sample > 0) fmt::print("\n{}\n", written.front());
  }

  ts::Session& session_;
  const StageOptions& options_;
  const Text& text_;
  ts::Pipeline pipe_;
  ts::optim::Optimizer optimizer_;
  std::optional<ts::CheckpointManager> manager_;
};

void run(StageOptions options) {
  // Detects wrong options, such as a missing text, before it waits for the other workers.
  auto worker_options = ts::WorkerOptions::from_env();
  check(options, worker_options.environment.world_size);
  options.model.device = devices::of_rank(options.device, worker_options.environment.local_rank);
  worker_options.device_maps = devices::maps(options.device, worker_options.environment);
  if (!options.drawing.empty() && worker_options.environment.rank <= 0) check_drawing(options.drawing);
  const Text text = Text::load(options.text, options.model.context);
  options.model.vocabulary = text.vocabulary();
  options.model.copies = options.visits_stages_once();
  text.encode(options.prompt);  // refuses characters that do not occur
  ts::Session session(worker_options);
  Training(session, options, text).run();
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<StageOptions>(
      "char_transformer_pipeline",
      "Trains a small character transformer whose blocks are spread over worker processes.", argc, argv,
      add_options, run);
}
