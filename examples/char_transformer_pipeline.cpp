// Trains a small GPT on the quotations of the fortune program, with its blocks distributed over worker processes:
//   tools/fetch-data fortunes.txt
//   torchspan run -n 2 char_transformer_pipeline
// Micro-batches flow through the stages, and a backward runs as soon as one is ready (1F1B). With --tied, the
// embedding's matrix, which lives on the first worker, also computes the scores; with a zero-bubble schedule, the head
// has a copy of it instead, and both get the sum of their gradients.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <torchspan/core/error.h>
#include <torchspan/core/progress.h>
#include <torchspan/pipeline/pipeline.h>
#include <torchspan/torchspan.h>

#include "char_transformer/generate.h"
#include "char_transformer/model.h"
#include "char_transformer/text.h"
#include "devices/devices.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace char_transformer;

namespace {

struct Options {
  std::string text = "build/data/fortunes.txt";
  ModelOptions model;
  std::int64_t steps = 400;
  std::int64_t batch = 32;
  int micro_batches = 4;
  double lr = 0.003;
  std::int64_t sample = 300;
  std::string prompt = "Call me ";
  std::string drawing;
  std::string schedule = "1f1b";
  std::string device = "cpu";
  std::string checkpoint;
  std::int64_t checkpoint_every = 100;
};

void add_options(CLI::App& app, Options& options) {
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 20);
  app.add_option("--text", options.text, "a UTF-8 file")->capture_default_str();
  app.add_option("--steps", options.steps)->check(positive)->capture_default_str();
  app.add_option("--batch", options.batch, "rows per step")->check(positive)->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches)->check(CLI::Range(1, 4096))->capture_default_str();
  app.add_option("--context", options.model.context, "characters per row")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--width", options.model.width)->check(positive)->capture_default_str();
  app.add_option("--blocks", options.model.blocks)->check(positive)->capture_default_str();
  app.add_option("--heads", options.model.heads)->check(positive)->capture_default_str();
  app.add_option("--dropout", options.model.dropout)->check(CLI::Range(0.0, 0.9))->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seed", options.model.seed)->capture_default_str();
  app.add_flag("--tied", options.model.tied, "use the embedding's matrix as the output layer, too");
  app.add_option("--schedule", options.schedule)
      ->check(CLI::IsMember({"1f1b", "gpipe", "arrival", "zb-h1", "zb-h2", "zbv"}))
      ->capture_default_str();
  app.add_option("--sample", options.sample, "characters to write at the end")->capture_default_str();
  app.add_option("--prompt", options.prompt, "beginning of the sample")->capture_default_str();
  devices::add_option(app, options.device);
  app.add_option(
      "--checkpoint", options.checkpoint,
      "folder: save the state regularly, and resume from the newest state there, also with another "
      "number of workers");
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps from one saved state to the next")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--draw", options.drawing, "SVG file for the last step and its plan");
}

void check_written(const std::ofstream& file, const std::string& path) {
  if (!file)
    throw ts::Error(ts::ErrorKind::kInvalid, fmt::format("--draw {}: this file cannot be written", path));
}

ts::pipeline::Schedule schedule_of(const std::string& name) {
  using ts::pipeline::Schedule;
  const std::map<std::string, Schedule> all{{"1f1b", Schedule::k1F1B},       {"gpipe", Schedule::kGPipe},
                                            {"arrival", Schedule::kArrival}, {"zb-h1", Schedule::kZBH1},
                                            {"zb-h2", Schedule::kZBH2},      {"zbv", Schedule::kZBV}};
  return all.at(name);
}

/// ZBV has two stages on each worker.
int stage_count(const Options& options, int workers) { return workers * (options.schedule == "zbv" ? 2 : 1); }

ts::pipeline::PipelineOptions pipeline_options(const Options& options, int workers) {
  ts::pipeline::PipelineOptions made;
  made.balance = balance(options.model, stage_count(options, workers));
  made.micro_batches = options.micro_batches;
  made.schedule = schedule_of(options.schedule);
  made.checkpoint = ts::pipeline::ActivationCheckpoint::kNever;
  made.seed = options.model.seed;  // the same dropout on any number of workers
  return made;
}

/// The program that every worker runs.
class Training {
 public:
  Training(ts::Session& session, const Options& options, const Text& text)
      : session_(session),
        options_(options),
        text_(text),
        pipe_(session.worker(), layers(options.model),
              pipeline_options(options, static_cast<int>(session.world_size()))),
        optimizer_({ts::optim::ParamGroup(pipe_.parameters(), ts::optim::AdamW{.lr = options.lr},
                                          ts::checkpoint::parameter_names(pipe_))}) {}

  void run() {
    if (is_first()) fmt::print("{}", ts::pipeline::to_text(pipe_.plan()));
    const std::int64_t first = restore();
    ts::Progress progress(session_);
    for (std::int64_t step = first; step < options_.steps; ++step) {
      optimizer_.zero_grad();
      const double loss = step_on(static_cast<std::uint64_t>(step), false);
      optimizer_.step();
      if (!std::isfinite(loss)) {
        throw ts::Error(ts::ErrorKind::kInvalid,
                        fmt::format("the loss is not a finite number after step {}: lower --lr", step));
      }
      save_after(step + 1);
      if (is_first()) report(progress, step, loss, ts::to_seconds(progress.elapsed()));
    }
    progress.finish();
    const double seconds = ts::to_seconds(progress.elapsed());
    draw();
    const double held_out = validate();
    if (!std::isfinite(held_out)) {
      throw ts::Error(
          ts::ErrorKind::kInvalid,
          fmt::format("the loss on text not trained on is not a finite number after step {}: lower --lr",
                      options_.steps - 1));
    }
    if (is_first()) {
      const std::int64_t steps = options_.steps - first;
      fmt::print("{} steps of {} x {} characters in {:.1f} s: {:.0f} characters/s\n", steps, options_.batch,
                 options_.model.context, seconds,
                 static_cast<double>(steps * options_.batch * options_.model.context) / seconds);
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
    std::fflush(stdout);
    return step;
  }
  void save_after(std::int64_t step) {
    const bool is_last = step == options_.steps;
    if (!manager_ || (step % options_.checkpoint_every != 0 && !is_last)) return;
    manager_->save(step);
    if (is_last) manager_->wait();
  }
  double step_on(std::uint64_t seed, bool held_out) {
    const auto windows = text_.windows(options_.batch, options_.model.context, seed, held_out);
    return pipe_.train_step(windows.characters, windows.next, loss);
  }
  void report(ts::Progress& progress, std::int64_t step, double loss, double seconds) const {
    ts::ProgressReport line;
    line.step = step + 1;
    line.steps = options_.steps;
    line.loss = loss;
    line.unit = "characters";
    line.rate = static_cast<double>((step + 1) * options_.batch * options_.model.context) / seconds;
    progress.report(line);
  }
  double validate() {
    constexpr std::uint64_t kBatches = 10;
    const torch::NoGradGuard no_grad;
    pipe_.eval();
    double sum = 0;
    for (std::uint64_t batch = 0; batch < kBatches; ++batch) sum += step_on(1'000'000 + batch, true);
    return sum / kBatches;
  }
  void draw() const {
    if (options_.drawing.empty() || !is_first()) return;
    const auto& report = pipe_.last_step();
    std::vector<ts::schedule::Timeline> timelines;
    if (!report.table.actions.empty())
      timelines.push_back(ts::schedule::simulate(
          report.table, ts::schedule::mean_costs(report.measured, report.table.stages())));
    timelines.push_back(report.measured);
    std::ofstream file(options_.drawing);
    file << ts::schedule::draw_svg(timelines);
    file.close();
    check_written(file, options_.drawing);
    fmt::print("drew {}\n", options_.drawing);
  }
  void write_sample() {
    const auto written = generate(session_, pipe_, text_, options_.prompt,
                                  {options_.sample, options_.model.context, options_.model.seed});
    if (is_first() && options_.sample > 0) fmt::print("\n{}\n", written.front());
  }

  ts::Session& session_;
  const Options& options_;
  const Text& text_;
  ts::pipeline::Pipeline pipe_;
  ts::optim::Optimizer optimizer_;
  std::optional<ts::CheckpointManager> manager_;
};

void check(const Options& options, int world_size) {
  if (options.model.width % options.model.heads != 0) {
    throw ts::Error(ts::ErrorKind::kInvalid, fmt::format("--width {} is not a multiple of --heads {}",
                                                         options.model.width, options.model.heads));
  }
  const int stages = stage_count(options, world_size);
  if (world_size < 1 || stages > options.model.blocks) {
    throw ts::Error(ts::ErrorKind::kInvalid,
                    fmt::format("{} workers cannot share {} blocks: give --blocks {}, or start "
                                "fewer",
                                world_size, options.model.blocks, stages));
  }
}

void run(Options options) {
  // Detects wrong options, such as a missing text, before it waits for the other workers.
  auto worker_options = ts::WorkerOptions::from_env();
  check(options, worker_options.environment.world_size);
  options.model.device = devices::of_rank(options.device, worker_options.environment.local_rank);
  worker_options.device_maps = devices::maps(options.device, worker_options.environment);
  if (!options.drawing.empty() && worker_options.environment.rank <= 0)
    check_written(std::ofstream(options.drawing, std::ios::app), options.drawing);
  const Text text = Text::load(options.text, options.model.context);
  options.model.vocabulary = text.vocabulary();
  options.model.copies = options.schedule.starts_with("zb");  // these schedules visit each stage once
  text.encode(options.prompt);
  ts::Session session(worker_options);
  Training(session, options, text).run();
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "char_transformer_pipeline",
      "Trains a small character transformer whose blocks are spread over worker processes.", argc, argv,
      add_options, run);
}
