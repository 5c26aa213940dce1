#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/wire.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/training.h"
#include "parameter_server/server.h"

namespace CLI {
class App;
}

namespace parameter_server {

struct Options : fashion_mnist::TrainingOptions {
  double lr = 0.05, momentum = 0.9;
  std::int64_t wait_for = 0;  ///< gradients for one step; 0: of all trainers
  bool is_double = false, compare = true;
};
void add_options(CLI::App& app, Options& options);

/// One trainer's work: its part of each batch.
struct Part {
  static constexpr torchspan::FixedString kWireName = "Part";
  std::string data;
  std::int64_t epochs = 0, batch = 0, limit = 0;
  std::uint64_t seed = 0;
  bool is_double = false;
  std::int64_t trainer = 0, trainers = 1;
};

struct Report {
  static constexpr torchspan::FixedString kWireName = "Report";
  std::int64_t images = 0;
  double seconds = 0, loss = 0;  ///< of the last step
};

/// Loads at most TrainingOptions::limit training images.
fashion_mnist::Dataset load(const Part& part);
/// Gradients of `scale` times the sum of the losses, by parameter, and the loss.
struct Gradients {
  std::vector<at::Tensor> values;
  double loss;
};
Gradients gradients_of(fashion_mnist::ConvNet network, const fashion_mnist::Batch& batch, double scale);

void set_parameters(fashion_mnist::ConvNet network, const std::vector<at::Tensor>& parameters);
/// A network with these parameters, as float, which predicts.
fashion_mnist::ConvNet network_with(const std::vector<at::Tensor>& parameters);
/// A network of Options::seed, trained by LibTorch alone with whole batches.
fashion_mnist::ConvNet train_in_one_process(const Options& options, const fashion_mnist::Dataset& data);
/// The largest absolute difference.
double difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right);

}  // namespace parameter_server
