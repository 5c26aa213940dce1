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

/// A row of numbers for each of `count` things, all zero at first. Its gradients are sparse: a step touches
/// the rows that were looked up.
class TableImpl : public torch::nn::Module {
 public:
  TableImpl(std::int64_t count, std::int64_t width);
  /// int64 [n] to float [n, width]. In evaluation mode no gradients are recorded.
  at::Tensor forward(const at::Tensor& things);

 private:
  torch::nn::Embedding rows_{nullptr};
};
TORCH_MODULE(Table);

inline constexpr torchspan::Class<Table, std::int64_t, std::int64_t> kTable{"Table"};
inline constexpr torchspan::Function<&TableImpl::forward> kLookUp{"Table.forward"};
inline constexpr torchspan::Function<&torch::nn::Module::train> kSetTraining{"Module.train"};

/// A rating is predicted as the mean, plus what its student, its lecturer and its circumstances add, plus how
/// this lecturer does under these circumstances: a row of numbers, one a circumstance. The tables live on
/// other workers.
struct Model {
  torchspan::RRef<Table> students;   ///< [students, 1]
  torchspan::RRef<Table> lecturers;  ///< [lecturers, 1 + circumstances]
  torchspan::RRef<Table> profiles;   ///< [profiles, 1]
  double mean = 0;

  struct Prediction {
    at::Tensor values;                         ///< float [n]
    at::Tensor students, lecturers, profiles;  ///< the rows that were looked up
  };
  /// Asks the three tables at once.
  Prediction predict(const Ratings& ratings) const;
  void set_training(bool on) const;
};

/// How strongly parameters are drawn to zero: as if each thing had so many ratings more that say so.
struct Priors {
  double student = 13, lecturer = 5, interaction = 15, profile = 20;
};

/// How often each student, lecturer and circumstance occurs in the training ratings.
struct Occurrences {
  explicit Occurrences(const Ratings& ratings);
  at::Tensor students, lecturers, profiles;
};

/// The mean square error of the batch plus its part of the priors' penalty.
at::Tensor loss_of(const Model::Prediction& prediction, const Ratings& batch, const Occurrences& all,
                   const Priors& priors = Priors());

}  // namespace recommender

template <>
struct torchspan::Wire<recommender::Model>
    : torchspan::WireStruct<recommender::Model, "Model", &recommender::Model::students,
                            &recommender::Model::lecturers, &recommender::Model::profiles,
                            &recommender::Model::mean> {};
