#include "ddp_with_embedding/model.h"

#include <cmath>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

namespace ddp_with_embedding {
namespace {

constexpr std::int64_t kHidden = 32;

/// Draws all parameters uniformly between -most and most.
void draw_parameters(torch::nn::Module& module, const Shape& shape, double most) {
  if (shape.is_double) module.to(at::kDouble);
  const at::Generator random = at::detail::createCPUGenerator(shape.seed);
  const c10::NoGradGuard off;
  for (const at::Tensor& parameter : module.parameters())
    parameter.copy_(at::empty(parameter.sizes(), at::kDouble).uniform_(-most, most, random));
}

}  // namespace

TableImpl::TableImpl(const Shape& shape)
    : rows_(register_module(
          "rows",
          torch::nn::EmbeddingBag(
              torch::nn::EmbeddingBagOptions(shape.rows, shape.width).mode(torch::kSum).sparse(true)))) {
  draw_parameters(*this, shape, 0.05);
}
at::Tensor TableImpl::forward(const at::Tensor& bags) { return rows_->forward(bags); }

DenseImpl::DenseImpl(const Shape& shape)
    : layers_(register_module(
          "layers", torch::nn::Sequential(torch::nn::Linear(shape.width + shape.circumstances, kHidden),
                                          torch::nn::Tanh(), torch::nn::Linear(kHidden, 1)))) {
  draw_parameters(*this, shape, 1 / std::sqrt(static_cast<double>(kHidden)));
}
DenseImpl::DenseImpl(const Shape& shape, const std::vector<at::Tensor>& trained) : DenseImpl(shape) {
  const c10::NoGradGuard off;
  const std::vector<at::Tensor> mine = parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i].copy_(trained.at(i));
}
at::Tensor DenseImpl::forward(const at::Tensor& embedded, const at::Tensor& circumstances) {
  return embedded.select(1, 0) + layers_->forward(at::cat({embedded, circumstances}, 1)).squeeze(1);
}

Examples examples_of(const recommender::Ratings& ratings, double mean, bool is_double) {
  const at::ScalarType type = is_double ? at::kDouble : at::kFloat;
  // Of each circumstance, one category holds.
  const at::Tensor categories = ratings.circumstances.nonzero().select(1, 1).view({ratings.size(), -1});
  const at::Tensor lecturers = ratings.lecturers.unsqueeze(1) + ratings.student_count;
  const at::Tensor pairs = ratings.lecturers.unsqueeze(1) * ratings.circumstance_count() + categories +
                           ratings.student_count + ratings.lecturer_count;
  return {at::cat({ratings.students.unsqueeze(1), lecturers, pairs}, 1), ratings.circumstances.to(type),
          ratings.values.to(type) - mean};
}

Shape shape_for(const recommender::Ratings& ratings, Shape shape) {
  shape.circumstances = ratings.circumstance_count();
  shape.rows = ratings.student_count + ratings.lecturer_count * (1 + shape.circumstances);
  return shape;
}

}  // namespace ddp_with_embedding
