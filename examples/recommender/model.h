#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <torchspan/rpc/worker.h>

#include "recommender/ratings.h"

namespace recommender {

/// A table with a row of numbers for each of `count` items, initially zero. Its gradients are sparse: a step
/// changes only the rows that were looked up.
class TableImpl : public torch::nn::Module {
 public:
  TableImpl(std::int64_t count, std::int64_t width);
  /// Looks up int64 [n]; returns float [n, width]. In evaluation mode no gradients are recorded.
  at::Tensor forward(const at::Tensor& things);

 private:
  torch::nn::Embedding rows_{nullptr};
};
TORCH_MODULE(Table);

inline constexpr torchspan::Class<Table, std::int64_t, std::int64_t> kTable{"Table"};
inline constexpr torchspan::Function<&TableImpl::forward> kLookUp{"Table.forward"};
inline constexpr torchspan::Function<&torch::nn::Module::train> kSetTraining{"Module.train"};

/// Predicts a rating as the mean, plus terms of its student, its lecturer and its circumstances, plus an
/// interaction of the lecturer with the circumstances (a row of numbers, one per circumstance). The tables
/// live on other workers.
struct Model {
  static constexpr torchspan::FixedString kWireName = "Model";
  torchspan::RRef<Table> students;   ///< [students, 1]
  torchspan::RRef<Table> lecturers;  ///< [lecturers, 1 + circumstances]
  torchspan::RRef<Table> profiles;   ///< [profiles, 1]
  double mean = 0;

  struct Prediction {
    at::Tensor values;                         ///< float [n]
    at::Tensor students, lecturers, profiles;  ///< the rows that were looked up
  };
  /// Queries the three tables concurrently.
  Prediction predict(const Ratings& ratings) const;
  void set_training(bool on) const;
};

/// How strongly parameters are shrunk to zero: as if there were that many more observations of zero for each.
struct Priors {
  double student = 13, lecturer = 5, interaction = 15, profile = 20;
};

/// The number of training ratings of each student, lecturer and circumstance.
struct Occurrences {
  explicit Occurrences(const Ratings& ratings);
  at::Tensor students, lecturers, profiles;
};

/// The mean square error of the batch, plus its share of the priors' penalty.
at::Tensor loss_of(const Model::Prediction& prediction, const Ratings& batch, const Occurrences& all,
                   const Priors& priors = Priors());

}  // namespace recommender
