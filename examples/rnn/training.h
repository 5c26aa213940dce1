#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "rnn/corpus.h"
#include "rnn/model.h"

namespace CLI {
class App;
}

namespace rnn {

struct Options {
  std::string text = "build/data/fortunes.txt";
  std::int64_t steps = 600, rows = 32, context = 32;
  Shape shape;
  double lr = 0.004, max_norm = 1;
  bool compare = true;
};
void add_options(CLI::App& app, Options& options);

/// A model's logits, after which `state` is that of the next window.
using Forward = std::function<at::Tensor(const at::Tensor& characters, State& state)>;

/// The mean cross entropy of the characters that follow.
at::Tensor loss_of(const Forward& forward, const Windows::Window& window, State& state);

/// Calls `step` with one window after the other and the state of the LSTM before it; `step` trains and returns the loss.
/// Returns the losses. Throws torchspan::Error{kInvalid} when one is not finite.
std::vector<double> train(const Options& options, const Corpus& corpus,
                          const std::function<double(const Windows::Window&, State&)>& step);

/// Trains the same model by LibTorch alone. Returns the losses.
std::vector<double> train_in_one_process(const Options& options, const Corpus& corpus, LocalModel& model);

/// The mean loss on the held-out text; records no gradients of local modules.
double held_out_loss(const Options& options, const Corpus& corpus, const Forward& forward);

}  // namespace rnn
