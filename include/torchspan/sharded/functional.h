#pragma once
// Collective operations with gradients. Includes no torch/nn.
#include <cstdint>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>

/// Collective operations through which gradients flow. The gradient of an input is that of the sum of all ranks'
/// losses. All ranks call the same operations in the same order, and run their backward passes; these block for
/// the group, and throw what it throws. Inputs are not changed. No double backward: Error{kUnsupported}.
namespace torchspan::functional {

/// The sum over the ranks. Backward: the sum of the gradients.
at::Tensor all_reduce(const at::Tensor& tensor, const collective::Group& group);
/// All ranks' tensors of one shape, concatenated along `dim`. Backward: reduce_scatter().
at::Tensor all_gather(const at::Tensor& tensor, const collective::Group& group, std::int64_t dim = 0);
/// This rank's part of the sum, which is split evenly along `dim`. Backward: all_gather().
at::Tensor reduce_scatter(const at::Tensor& tensor, const collective::Group& group, std::int64_t dim = 0);
/// Splits evenly along `split_dim`, sends part r to rank r, and concatenates what arrives along `concat_dim`.
/// Backward: the reverse exchange.
at::Tensor all_to_all(const at::Tensor& tensor, const collective::Group& group, std::int64_t split_dim,
                      std::int64_t concat_dim);

/// For layers whose parts are on the ranks of a group while all ranks compute one loss (Shoeybi et al.,
/// "Megatron-LM", 2019). A tensor is either whole, with the same values on all ranks, or this rank's part.
/// whole -> whole, before ranks use it differently. Backward: the sum of the gradients.
at::Tensor copy_to_ranks(const at::Tensor& whole, const collective::Group& group);
/// Summands -> whole. Backward: the gradient as it is.
at::Tensor sum_over_ranks(const at::Tensor& summand, const collective::Group& group);
/// Parts -> whole, concatenated along `dim`. Backward: this rank's part of the gradient.
at::Tensor gather_parts(const at::Tensor& part, const collective::Group& group, std::int64_t dim = -1);
/// whole -> this rank's part, split evenly along `dim`. Backward: the concatenated gradients.
at::Tensor own_part(const at::Tensor& whole, const collective::Group& group, std::int64_t dim = -1);

/// The mean cross entropy of scores whose classes are divided among the ranks, such as the outputs of a
/// ColumnParallelLinear: `part`, of shape [..., this rank's classes], has the classes after those of lower ranks.
/// `targets`, of shape [...], has class numbers, the same on all ranks. Never gathers the scores. Float32 at least.
/// Throws Error{kInvalid} for a class number that is out of range.
at::Tensor vocabulary_parallel_cross_entropy(const at::Tensor& part, const at::Tensor& targets,
                                             const collective::Group& group);

}  // namespace torchspan::functional
