#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <torchspan/rpc/remote_module.h>

#include "recommender/ratings.h"

namespace ddp_with_embedding {

/// What both parts of the model agree on. Parameters are drawn from `seed`, the same in any process.
struct Shape {
  static constexpr torchspan::FixedString kWireName = "Shape";
  std::int64_t rows = 0, circumstances = 0, width = 16;
  std::uint64_t seed = 1;
  bool is_double = false;
};

/// A table with a row for each student, for each lecturer, and for each lecturer in each circumstance. Its gradients are
/// sparse.
class TableImpl : public torch::nn::Module {
 public:
  explicit TableImpl(const Shape& shape);
  /// Adds the rows of each bag: int64 [n, k] to [n, width].
  at::Tensor forward(const at::Tensor& bags);

 private:
  torch::nn::EmbeddingBag rows_;
};
TORCH_MODULE(Table);

/// [n, width] rows and [n, circumstances] to a rating [n], less the mean of all ratings: the first column, and what two
/// layers make of all.
class DenseImpl : public torch::nn::Module {
 public:
  explicit DenseImpl(const Shape& shape);
  /// With these parameters.
  DenseImpl(const Shape& shape, const std::vector<at::Tensor>& trained);
  at::Tensor forward(const at::Tensor& embedded, const at::Tensor& circumstances);

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(Dense);

inline constexpr torchspan::ModuleClass<Table, Shape> kTable{"Table"};

/// Rows of the table, circumstances, and ratings, less the mean of the ratings to train on.
struct Examples {
  at::Tensor bags;           ///< int64 [n, k]
  at::Tensor circumstances;  ///< [n, c], one column for each category of each circumstance: 0 or 1
  at::Tensor values;         ///< [n]

  std::int64_t size() const { return values.size(0); }
  Examples at(const at::Tensor& positions) const {
    return {bags.index_select(0, positions), circumstances.index_select(0, positions),
            values.index_select(0, positions)};
  }
};

/// The examples of some ratings; `mean` is that of the ratings to train on.
Examples examples_of(const recommender::Ratings& ratings, double mean, bool is_double);
/// The shape of a model for these ratings.
Shape shape_for(const recommender::Ratings& ratings, Shape shape);

}  // namespace ddp_with_embedding
