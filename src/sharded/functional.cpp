#include <fmt/format.h>
#include <functional>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded/functional.h>

#include "core/api/step_part.h"
#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"
#include "engine/api/node_ptr.h"

namespace torchspan::functional {
namespace {

using collective::Group;
using Backward = std::function<at::Tensor(const at::Tensor&)>;

struct CollectiveBackward final : torch::autograd::Node {
  CollectiveBackward(std::string operation, Backward backward)
      : operation_(std::move(operation)), backward_(std::move(backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled()) {
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("functional::{} has no second derivative: run backward without create_graph",
                              operation_));
    }
    // All ranks take part, even if this one's output was not used.
    const at::Tensor gradient = gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like();
    return {backward_(gradient)};
  }
  std::string name() const override { return operation_ + "Backward"; }

 private:
  const std::string operation_;
  const Backward backward_;
};

/// Runs `forward`, which must not record gradients, and records `backward` for its output.
template <class Forward>
at::Tensor recorded(const char* operation, const at::Tensor& input, Forward forward, Backward backward) {
  at::Tensor output;
  {
    const at::NoGradGuard no_grad;
    output = forward(input.detach());
  }
  if (!torch::autograd::compute_requires_grad(input)) return output;
  auto node = engine::make_node<CollectiveBackward>(operation, std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::create_gradient_edge(output, node);
  return output;
}

/// The pass of a pipeline's step must know it before its backward, which may run on another thread.
void communicates_in_backward(const char* operation, const Group& group) {
  if (group.size() > 1) StepPartScope::begin_operation(operation);
}

at::Tensor summed(const at::Tensor& tensor, const Group& group) {
  return group.all_reduce(tensor.clone(at::MemoryFormat::Contiguous)).wait();
}

std::int64_t checked_dim(const char* operation, const at::Tensor& tensor, std::int64_t dim) {
  if (dim >= -tensor.dim() && dim < tensor.dim()) return dim < 0 ? dim + tensor.dim() : dim;
  throw_invalid("functional::{} along dimension {} of a tensor of {} dimensions", operation, dim,
                tensor.dim());
}

void check_split(const char* operation, const at::Tensor& tensor, std::int64_t dim, const Group& group) {
  if (tensor.size(dim) % group.size() == 0) return;
  throw_invalid(
      "functional::{} on rank {}: dimension {} of a tensor of shape [{}] cannot be split evenly among {} "
      "ranks",
      operation, group.rank(), dim, fmt::join(tensor.sizes().vec(), ", "), group.size());
}

at::Tensor concatenated(const at::Tensor& part, const Group& group, std::int64_t dim) {
  const std::vector<at::Tensor> parts = group.all_gather(part.contiguous()).wait();
  for (std::size_t rank = 1; rank < parts.size(); ++rank) {
    if (parts[rank].sizes() == parts[0].sizes()) continue;
    throw_invalid("the parts of ranks 0 and {} differ in shape: [{}] and [{}]", rank,
                  fmt::join(parts[0].sizes().vec(), ", "), fmt::join(parts[rank].sizes().vec(), ", "));
  }
  return at::cat(parts, dim);
}

at::Tensor scattered_sum(const at::Tensor& tensor, const Group& group, std::int64_t dim) {
  const at::Tensor first = tensor.movedim(dim, 0).clone(at::MemoryFormat::Contiguous);
  return group.reduce_scatter(first).wait().movedim(0, dim).contiguous();
}

at::Tensor part_of(const at::Tensor& whole, const Group& group, std::int64_t dim) {
  const std::int64_t size = whole.size(dim) / group.size();
  return whole.narrow(dim, group.rank() * size, size).contiguous();
}

at::Tensor exchanged(const at::Tensor& tensor, const Group& group, std::int64_t split_dim,
                     std::int64_t concat_dim) {
  std::vector<at::Tensor> parts = tensor.chunk(group.size(), split_dim);
  for (at::Tensor& part : parts) part = part.contiguous();
  return at::cat(group.all_to_all(std::move(parts)).wait(), concat_dim);
}

/// The classes [first, end) of `all` are on this rank.
struct ClassRange {
  ClassRange(std::int64_t count, const Group& group) {
    int rank = 0;
    for (const at::Tensor& its : group.all_gather(at::full({1}, count, at::kLong)).wait()) {
      if (rank++ == group.rank()) first = all;
      all += its.item<std::int64_t>();
    }
    end = first + count;
  }
  std::int64_t first = 0, end = 0, all = 0;
};

void check_targets(const at::Tensor& part, const at::Tensor& targets, std::int64_t classes,
                   const Group& group) {
  if (part.dim() == 0 || part.size(-1) == 0 || part.sizes().slice(0, part.dim() - 1) != targets.sizes()) {
    throw_invalid(
        "vocabulary_parallel_cross_entropy on rank {}: scores of shape [{}] and targets of shape [{}]; "
        "scores have one more dimension, with at least one class",
        group.rank(), fmt::join(part.sizes().vec(), ", "), fmt::join(targets.sizes().vec(), ", "));
  }
  if (targets.numel() == 0) return;
  const auto least = targets.min().item<std::int64_t>(), most = targets.max().item<std::int64_t>();
  if (least >= 0 && most < classes) return;
  throw_invalid("vocabulary_parallel_cross_entropy on rank {}: target {} of {} classes", group.rank(),
                least < 0 ? least : most, classes);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const Group& group) {
  const auto sum = [group](const at::Tensor& one) { return summed(one, group); };
  return recorded("all_reduce", tensor, sum, sum);
}

at::Tensor all_gather(const at::Tensor& tensor, const Group& group, std::int64_t dim) {
  const std::int64_t at = checked_dim("all_gather", tensor, dim);
  return recorded(
      "all_gather", tensor, [&](const at::Tensor& part) { return concatenated(part, group, at); },
      [group, at](const at::Tensor& gradient) { return scattered_sum(gradient, group, at); });
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const Group& group, std::int64_t dim) {
  const std::int64_t at = checked_dim("reduce_scatter", tensor, dim);
  check_split("reduce_scatter", tensor, at, group);
  return recorded(
      "reduce_scatter", tensor, [&](const at::Tensor& one) { return scattered_sum(one, group, at); },
      [group, at](const at::Tensor& gradient) { return concatenated(gradient, group, at); });
}

at::Tensor all_to_all(const at::Tensor& tensor, const Group& group, std::int64_t split_dim,
                      std::int64_t concat_dim) {
  const std::int64_t from = checked_dim("all_to_all", tensor, split_dim);
  const std::int64_t to = checked_dim("all_to_all", tensor, concat_dim);
  check_split("all_to_all", tensor, from, group);
  return recorded(
      "all_to_all", tensor, [&](const at::Tensor& one) { return exchanged(one, group, from, to); },
      [group, from, to](const at::Tensor& gradient) { return exchanged(gradient, group, to, from); });
}

at::Tensor copy_to_ranks(const at::Tensor& whole, const Group& group) {
  communicates_in_backward("copy_to_ranks", group);
  return recorded(
      "copy_to_ranks", whole, [](const at::Tensor& one) { return one.detach(); },
      [group](const at::Tensor& gradient) { return summed(gradient, group); });
}

at::Tensor sum_over_ranks(const at::Tensor& summand, const Group& group) {
  return recorded(
      "sum_over_ranks", summand, [&](const at::Tensor& one) { return summed(one, group); },
      [](const at::Tensor& gradient) { return gradient; });
}

at::Tensor gather_parts(const at::Tensor& part, const Group& group, std::int64_t dim) {
  const std::int64_t at = checked_dim("gather_parts", part, dim);
  return recorded(
      "gather_parts", part, [&](const at::Tensor& one) { return concatenated(one, group, at); },
      [group, at](const at::Tensor& gradient) { return part_of(gradient, group, at); });
}

at::Tensor own_part(const at::Tensor& whole, const Group& group, std::int64_t dim) {
  const std::int64_t at = checked_dim("own_part", whole, dim);
  check_split("own_part", whole, at, group);
  communicates_in_backward("own_part", group);
  return recorded(
      "own_part", whole, [&](const at::Tensor& one) { return part_of(one, group, at); },
      [group, at](const at::Tensor& gradient) { return concatenated(gradient, group, at); });
}

at::Tensor vocabulary_parallel_cross_entropy(const at::Tensor& part, const at::Tensor& targets,
                                             const Group& group) {
  const ClassRange range(part.dim() == 0 ? 0 : part.size(-1), group);
  check_targets(part, targets, range.all, group);
  const auto gradient_of_scores = std::make_shared<at::Tensor>();
  const auto forward = [&](const at::Tensor& scores) {
    at::Tensor shifted = device::widened(scores);
    const at::Tensor largest = shifted.amax(-1).contiguous();
    group.all_reduce(largest, collective::kMax).wait();
    shifted = shifted - largest.unsqueeze(-1);
    const at::Tensor here = targets.ge(range.first).logical_and(targets.lt(range.end));
    const at::Tensor place = at::where(here, targets - range.first, at::zeros_like(targets)).unsqueeze(-1);
    const at::Tensor ours = here.to(shifted.scalar_type());
    at::Tensor probabilities = shifted.exp();
    // The sum of exponentials, and the score of the target, which one rank has.
    const at::Tensor sums =
        at::stack({probabilities.sum(-1), shifted.gather(-1, place).squeeze(-1) * ours}).contiguous();
    group.all_reduce(sums).wait();
    probabilities.div_(sums[0].unsqueeze(-1));
    probabilities.scatter_add_(-1, place, -ours.unsqueeze(-1));
    // Not in half precision: the quotients may be smaller than its smallest number, until a loss scale multiplies them.
    *gradient_of_scores = probabilities.div_(static_cast<double>(targets.numel()));
    return (sums[0].log() - sums[1]).mean();
  };
  return recorded("vocabulary_parallel_cross_entropy", part, forward,
                  [gradient_of_scores, dtype = part.scalar_type()](const at::Tensor& gradient) {
                    return (*gradient_of_scores * gradient.to(gradient_of_scores->scalar_type())).to(dtype);
                  });
}

}  // namespace torchspan::functional
