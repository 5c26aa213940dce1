#include "rnn/training.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include <torchspan/core/error.h>

namespace rnn {

void add_options(CLI::App& app, Options& options) {
  const CLI::Range from_one(std::int64_t{1}, std::int64_t{1'000'000});
  app.add_option("--text", options.text, "UTF-8 file")->capture_default_str();
  app.add_option("--steps", options.steps)->check(from_one)->capture_default_str();
  app.add_option("--rows", options.rows, "parts of the text that a step reads")
      ->check(from_one)
      ->capture_default_str();
  app.add_option("--context", options.context, "characters of each part that a step reads")
      ->check(from_one)
      ->capture_default_str();
  app.add_option("--width", options.shape.width, "numbers that describe a character")
      ->check(from_one)
      ->capture_default_str();
  app.add_option("--seed", options.shape.seed)->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate of Adam")
      ->check(CLI::Range(1e-9, 1e38))
      ->capture_default_str();
  app.add_option("--max-norm", options.max_norm, "limit for the norm of all workers' gradients together")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str();
  app.add_flag("--double", options.shape.is_double, "compute with 64 bits");
  app.add_flag("!--no-compare", options.compare, "do not train in one process afterwards");
}

at::Tensor loss_of(const Forward& forward, const Windows::Window& window, State& state) {
  return torch::nn::functional::cross_entropy(forward(window.characters, state).flatten(0, 1),
                                              window.next.flatten());
}

std::vector<double> train(const Options& options, const Corpus& corpus,
                          const std::function<double(const Windows::Window&, State&)>& step) {
  std::vector<double> losses;
  State state(options.shape, options.rows);
  for (std::int64_t i = 0; i < options.steps; ++i) {
    const std::int64_t index = i % corpus.training().count();
    if (index == 0) state = State(options.shape, options.rows);
    losses.push_back(step(corpus.training().at(index), state));
    if (!std::isfinite(losses.back())) {
      throw torchspan::Error(
          torchspan::ErrorKind::kInvalid,
          fmt::format("the loss is not a finite number in step {}: lower --lr or --max-norm", i + 1));
    }
  }
  return losses;
}

std::vector<double> train_in_one_process(const Options& options, const Corpus& corpus, LocalModel& model) {
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(options.lr));
  const Forward forward = [&](const at::Tensor& characters, State& state) {
    return model.forward(characters, state);
  };
  return train(options, corpus, [&](const Windows::Window& window, State& state) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(forward, window, state);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model.parameters(), options.max_norm);
    optimizer.step();
    return loss.item<double>();
  });
}

double held_out_loss(const Options& options, const Corpus& corpus, const Forward& forward) {
  const c10::NoGradGuard off;
  State state(options.shape, options.rows);
  double sum = 0;
  for (std::int64_t i = 0; i < corpus.held_out().count(); ++i)
    sum += loss_of(forward, corpus.held_out().at(i), state).item<double>();
  return sum / static_cast<double>(corpus.held_out().count());
}

}  // namespace rnn
