#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/observation.h>
#include <torchspan/session.h>

#include "ddp_with_embedding/model.h"
#include "recommender/ratings.h"

namespace CLI {
class App;
}

namespace ddp_with_embedding {

struct Options {
  static constexpr torchspan::FixedString kWireName = "Options";
  std::string data = recommender::kDefaultFile;
  std::int64_t epochs = 5, batch = 512, limit = 0;
  Shape shape;
  double lr = 0.02, table_lr = 10;
  bool compare = true;
};
void add_options(CLI::App& app, Options& options);

/// Loads at most Options::limit ratings and holds out a tenth of them; the same in every process.
recommender::Split load(const Options& options);

/// The mean of the ratings to train on.
double mean_of(const recommender::Split& data);

/// The positions of each step's examples, shuffled; the rest of an epoch that does not fill a batch is left out.
std::vector<at::Tensor> batches_of(const Options& options, std::int64_t examples, std::int64_t epoch);

/// The squares of the errors, added up and divided by `count`.
at::Tensor loss_of(const at::Tensor& predicted, const at::Tensor& values, std::int64_t count);

/// What a trainer computed.
struct Report {
  static constexpr torchspan::FixedString kWireName = "Report";
  std::vector<double> losses;     ///< by step
  std::vector<at::Tensor> dense;  ///< parameters, at the end
  double seconds = 0;
};

/// Trains the same model by LibTorch alone, on whole batches.
Report train_in_one_process(const Options& options, const Examples& examples, Table& table, Dense& dense);

/// Collects what a trainer reports, and shows the progress on one of them.
class Recorder {
 public:
  Recorder(torchspan::Worker& worker, const Options& options, bool shown);
  /// Adds a step of an epoch, which has `steps`. Throws torchspan::Error{kInvalid} unless the loss is finite.
  void step(std::int64_t epoch, std::size_t steps, double loss);
  Report finish(const Dense& dense);

 private:
  const Options options_;
  const bool shown_;
  torchspan::Progress progress_;
  torchspan::ProgressReport line_;
  Report report_;
};

/// The error on held-out examples, whose looked up rows are `embedded`.
double root_mean_square_error(const Examples& examples, const at::Tensor& embedded, Dense& dense);

/// The largest absolute difference of two lists of tensors, or of numbers.
double difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right);
double difference(const std::vector<double>& left, const std::vector<double>& right);

/// Which rank does what. The master is rank 0.
struct Roles {
  explicit Roles(int world);
  bool trains(int rank) const;
  int server;
  std::vector<int> trainers;
};

/// Where handlers on a trainer find the group of all trainers.
class TrainerGroup : public torchspan::rpc::Extension {
 public:
  void attach(torchspan::rpc::Registrar&) override {}
  std::optional<torchspan::Group> group;
};

}  // namespace ddp_with_embedding
