// Trains a language model whose parts live on different workers: the embedding and the decoder on the last one, the LSTM
// on the one before it, and the training loop on rank 0:
//   tools/fetch-data fortunes.txt
//   torchspan run -n 3 rnn
// Gradients and optimizer steps go to the parts. Afterwards, LibTorch trains the same model in one process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/observation.h>
#include <torchspan/torchspan.h>

#include "programs/run_program.h"
#include "rnn/corpus.h"
#include "rnn/model.h"
#include "rnn/training.h"

namespace ts = torchspan;
using namespace rnn;

namespace {

std::vector<double> train_on_workers(ts::Session& session, const Options& options, const Corpus& corpus,
                                     const RNNModel& model) {
  ts::DistributedOptimizer optimizer(session, ts::optim::Adam{.lr = options.lr}, model.parts());
  ts::Progress progress(session);
  ts::ProgressReport shown;
  shown.steps = options.steps;
  shown.unit = "characters";
  const Forward forward = [&](const at::Tensor& characters, State& state) {
    return model.forward(characters, state);
  };
  auto losses = train(options, corpus, [&](const Windows::Window& window, State& state) {
    ts::Context context(session);
    const at::Tensor loss = loss_of(forward, window, state);
    context.backward(loss);                               // through all workers
    optimizer.clip_grad_norm(context, options.max_norm);  // by the norm of the gradients of all of them
    optimizer.step(context);
    shown.loss = loss.item<double>();
    shown.rate = static_cast<double>(++shown.step * window.next.numel()) / ts::to_seconds(progress.elapsed());
    progress.report(shown);
    return *shown.loss;
  });
  progress.finish();
  fmt::print("{} steps of {} x {} characters: {:.0f} characters/s\n", options.steps, options.rows,
             options.context, shown.rate);
  return losses;
}

double largest_difference(const std::vector<double>& left, const std::vector<double>& right) {
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i) most = std::max(most, std::abs(left[i] - right[i]));
  return most;
}

void lead(ts::Session& session, const Options& options, const Corpus& corpus) {
  const int world = session.world_size(), last = world - 1, lstm = std::max(0, world - 2);
  const RNNModel model(session.worker(), last, lstm, options.shape);
  fmt::print("embedding and decoder on {}, LSTM on {}, training loop on {}\n",
             session.worker().info(last).name, session.worker().info(lstm).name, session.worker().name());
  const std::vector<double> losses = train_on_workers(session, options, corpus, model);
  const RNNModel evaluated = model.for_evaluation();
  const double loss = held_out_loss(options, corpus, [&](const at::Tensor& characters, State& state) {
    return evaluated.forward(characters, state);
  });
  fmt::print("loss on text not trained on\n");
  fmt::print("  uniform guess                     {:.3f}\n",
             std::log(static_cast<double>(corpus.vocabulary())));
  fmt::print("  frequencies of characters         {:.3f}\n", corpus.frequency_loss());
  fmt::print("  frequencies of pairs              {:.3f}\n", corpus.pair_loss());
  fmt::print("  this model                        {:.3f}\n", loss);
  if (!options.compare) return;
  LocalModel local(options.shape);
  const std::vector<double> expected = train_in_one_process(options, corpus, local);
  fmt::print("  this model, trained in one process {:.3f}\n",
             held_out_loss(options, corpus, [&](const at::Tensor& characters, State& state) {
               return local.forward(characters, state);
             }));
  fmt::print("the losses of the {} steps differ by at most {:.1e}\n", losses.size(),
             largest_difference(losses, expected));
}

void run(const Options& given) {
  const auto worker_options = ts::WorkerOptions::from_env();
  constexpr int kMostWorkers = 3;
  if (worker_options.environment.world_size > kMostWorkers) {
    throw ts::Error(
        ts::ErrorKind::kInvalid,
        fmt::format("{} workers: the model has parts for {} at most; start it with torchspan run -n {}",
                    worker_options.environment.world_size, kMostWorkers, kMostWorkers));
  }
  const Corpus corpus(given.text, given.rows, given.context);
  Options options = given;
  options.shape.vocabulary = corpus.vocabulary();
  ts::FunctionTable functions;
  functions.add(kEmbeddingTable, kLstm, kDecoder);
  ts::Session session(worker_options, functions);
  session.run([&](ts::Session& running) {
    if (running.rank() == 0) lead(running, options, corpus);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "rnn", "Trains a recurrent language model whose parts live on different workers.", argc, argv,
      add_options, run);
}
