#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded/functional.h>
#include <torchspan/sharded/tensor_parallel.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/api/group_ranks.h"
#include "state/api/place.h"

namespace torchspan {
namespace {

using collective::Group;

/// What rank 0 of the group has, on every rank.
at::Tensor of_rank_0(const at::Tensor& tensor, const Group& group) {
  const at::NoGradGuard no_grad;
  return group.broadcast(tensor.detach().clone(at::MemoryFormat::Contiguous), 0).wait();
}

/// A copy of this rank's even share of `whole`, of which rank 0 has the values.
at::Tensor even_share(const at::Tensor& whole, const Group& group, std::int64_t dim, const char* what) {
  if (whole.size(dim) % group.size() != 0 || whole.size(dim) == 0) {
    throw_invalid("{} {} of a parallel layer cannot be split evenly among {} ranks", whole.size(dim), what,
                  group.size());
  }
  const std::int64_t size = whole.size(dim) / group.size();
  return of_rank_0(whole, group).narrow(dim, group.rank() * size, size).clone(at::MemoryFormat::Contiguous);
}

std::int64_t whole_size(const at::Tensor& part, std::int64_t dim, const Group& group) {
  return part.size(dim) * group.size();
}

/// A frozen layer stays frozen.
void train_like(at::Tensor& part, const at::Tensor& whole) { part.set_requires_grad(whole.requires_grad()); }

std::string in_words(const Group& group) { return fmt::format("rank {} of {}", group.rank(), group.size()); }

}  // namespace

TensorParallelModule::TensorParallelModule(std::string name, Group group)
    : torch::nn::Module(std::move(name)), group_(std::move(group)) {}

at::Tensor& TensorParallelModule::register_part(std::string name, at::Tensor part, std::int64_t dim,
                                                std::int64_t first, std::int64_t size) {
  state::Sizes shape = part.sizes().vec(), offset(shape.size(), 0);
  shape.at(static_cast<std::size_t>(dim)) = size;
  offset.at(static_cast<std::size_t>(dim)) = first;
  at::Tensor& registered = register_parameter(name, std::move(part));
  state::set_place(registered, std::make_shared<state::Place>(
                                   state::part_of(shape, std::move(offset), registered.sizes().vec(),
                                                  data_parallel::ranks_of(group_, state::kTensorParallel))));
  parts_.push_back({std::move(name), std::move(shape), dim, first});
  return registered;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in, std::int64_t out, Group group,
                                                   ColumnParallelOptions options)
    : ColumnParallelLinearImpl(torch::nn::Linear(in, out), std::move(group), options) {}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const torch::nn::Linear& whole, Group group,
                                                   ColumnParallelOptions options)
    : TensorParallelModule("ColumnParallelLinear", std::move(group)), options_(options) {
  const std::int64_t out = whole->weight.size(0), first = this->group().rank() * (out / this->group().size());
  weight =
      register_part("weight", even_share(whole->weight, this->group(), 0, "output features"), 0, first, out);
  train_like(weight, whole->weight);
  if (!whole->bias.defined()) return;
  bias = register_part("bias", even_share(whole->bias, this->group(), 0, "output features"), 0, first, out);
  train_like(bias, whole->bias);
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  const at::Tensor whole = options_.sequence_dim
                               ? functional::all_gather(input, group(), *options_.sequence_dim)
                               : functional::copy_to_ranks(input, group());
  const at::Tensor output = at::linear(whole, weight, bias);
  return options_.gather_output ? functional::gather_parts(output, group()) : output;
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("torchspan::ColumnParallelLinear({}, {}, {})", weight.size(1),
                        whole_size(weight, 0, group()), in_words(group()));
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in, std::int64_t out, Group group,
                                             RowParallelOptions options)
    : RowParallelLinearImpl(torch::nn::Linear(in, out), std::move(group), options) {}

RowParallelLinearImpl::RowParallelLinearImpl(const torch::nn::Linear& whole, Group group,
                                             RowParallelOptions options)
    : TensorParallelModule("RowParallelLinear", std::move(group)), options_(options) {
  const std::int64_t in = whole->weight.size(1), first = this->group().rank() * (in / this->group().size());
  weight =
      register_part("weight", even_share(whole->weight, this->group(), 1, "input features"), 1, first, in);
  train_like(weight, whole->weight);
  if (!whole->bias.defined()) return;
  bias = register_parameter("bias", of_rank_0(whole->bias, this->group()), whole->bias.requires_grad());
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const at::Tensor part = options_.input_is_part ? input : functional::own_part(input, group());
  const at::Tensor summand = at::linear(part, weight);
  if (!options_.sequence_dim) {
    const at::Tensor output = functional::sum_over_ranks(summand, group());
    return bias.defined() ? output + bias : output;
  }
  const at::Tensor output = functional::reduce_scatter(summand, group(), *options_.sequence_dim);
  return bias.defined() ? output + functional::copy_to_ranks(bias, group()) : output;
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("torchspan::RowParallelLinear({}, {}, {})", whole_size(weight, 1, group()),
                        weight.size(0), in_words(group()));
}

VocabularyParallelEmbeddingImpl::VocabularyParallelEmbeddingImpl(std::int64_t rows, std::int64_t width,
                                                                 Group group)
    : VocabularyParallelEmbeddingImpl(torch::nn::Embedding(rows, width), std::move(group)) {}

VocabularyParallelEmbeddingImpl::VocabularyParallelEmbeddingImpl(const torch::nn::Embedding& whole,
                                                                 Group group)
    : TensorParallelModule("VocabularyParallelEmbedding", std::move(group)), rows_(whole->weight.size(0)) {
  const Group& ranks = this->group();
  if (rows_ < ranks.size()) {
    throw_invalid("{} rows of an embedding cannot be split among {} ranks", rows_, ranks.size());
  }
  const auto& options = whole->options;
  if (options.padding_idx() || options.max_norm() || options.sparse()) {
    throw Error(ErrorKind::kUnsupported,
                "VocabularyParallelEmbedding has no padding_idx, no max_norm and no sparse gradients");
  }
  const std::int64_t share = rows_ / ranks.size(), more = rows_ % ranks.size();
  first_ = ranks.rank() * share + std::min<std::int64_t>(ranks.rank(), more);
  const std::int64_t count = share + (ranks.rank() < more ? 1 : 0);
  weight = register_part("weight", of_rank_0(whole->weight, ranks).narrow(0, first_, count).clone(), 0,
                         first_, rows_);
  train_like(weight, whole->weight);
}

at::Tensor VocabularyParallelEmbeddingImpl::forward(const at::Tensor& indices) {
  if (indices.numel() > 0) {
    const auto least = indices.min().item<std::int64_t>(), most = indices.max().item<std::int64_t>();
    if (least < 0 || most >= rows_) {
      throw_invalid("index {} of an embedding of {} rows, on rank {}", least < 0 ? least : most, rows_,
                    group().rank());
    }
  }
  const at::Tensor here = indices.ge(first_).logical_and(indices.lt(first_ + weight.size(0)));
  const at::Tensor local = at::embedding(weight, at::where(here, indices - first_, at::zeros_like(indices)));
  return functional::sum_over_ranks(local * here.unsqueeze(-1).to(local.scalar_type()), group());
}

void VocabularyParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("torchspan::VocabularyParallelEmbedding({}, {}, {})", rows_, weight.size(1),
                        in_words(group()));
}

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(const torch::nn::LayerNormOptions& options,
                                                             Group group)
    : TensorParallelModule("SequenceParallelLayerNorm", std::move(group)), options_(options) {
  if (!options.elementwise_affine()) return;
  weight = register_parameter("weight", at::ones(options.normalized_shape()));
  bias = register_parameter("bias", at::zeros(options.normalized_shape()));
}

at::Tensor SequenceParallelLayerNormImpl::forward(const at::Tensor& part) {
  if (!weight.defined()) return at::layer_norm(part, options_.normalized_shape(), {}, {}, options_.eps());
  return at::layer_norm(part, options_.normalized_shape(), functional::copy_to_ranks(weight, group()),
                        functional::copy_to_ranks(bias, group()), options_.eps());
}

void SequenceParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("torchspan::SequenceParallelLayerNorm([{}], {})",
                        fmt::join(options_.normalized_shape(), ", "), in_words(group()));
}

}  // namespace torchspan
