#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <torchspan/collective.h>
#include <torchspan/core/bytes.h>

#include "core/api/agreement.h"

/// Conversions between callers' tensors and the contiguous memory that backends use.
namespace torchspan::collective {

/// Returns LibTorch's name of a dtype number ("Float"), or the number if it has no name.
std::string name_of_dtype(std::int8_t dtype);
/// Whether the reductions of Gloo, MPI and NCCL give a NaN or not, depending on the rank that has it. Ours, like at::minimum(),
/// always give it.
bool loses_nan(at::ScalarType dtype, ReduceOp reduction);

/// Returns the dense tensor itself, or a contiguous copy without pending conjugation or negation.
at::Tensor plain(const at::Tensor& tensor);
/// Copies a result to the caller's tensor, unless they share memory, and increments that tensor's version.
/// Returns it. Autograd does not record this.
at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor);
/// The error of an all_gather_into_tensor() whose tensor on `rank` has another shape than this rank's.
std::string different_shapes(std::size_t rank, at::IntArrayRef theirs, at::IntArrayRef own);

struct SplitPlan {
  std::vector<int> ranks;    ///< of the part: those with this color, ordered by key, then by rank
  std::uint64_t number = 0;  ///< of this split, the same on all ranks; other splits of the world have others
};
/// Collective: exchanges `color` and `key`.
SplitPlan plan_split(const GatherBytes& gather, int color, int key);

/// Throws Error{kUnsupported} for dtypes that cannot be reduced in this way, and for other reductions of a sparse tensor
/// than sums and averages.
void check_reducible(const at::Tensor& tensor, ReduceOp reduction);
/// The sum of the entries of all ranks' sparse tensors, divided by `divisor`. Half and bfloat16 are added in float, and
/// rounded once.
at::Tensor sum_of_sparse(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes,
                         std::int64_t divisor);

/// "all_reduce_coalesced", ….
std::string_view name_of(CoalescedCall::Verb verb);
/// "[2, 3], [4]".
std::string shapes_of(const std::vector<at::Tensor>& tensors);

/// The tensors as the rows of one, each of which has 1/`rows` of every tensor; in new memory unless there is one
/// tensor, which is contiguous.
at::Tensor join_rows(const std::vector<at::Tensor>& tensors, std::int64_t rows);
/// Cuts a row of join_rows() into tensors of these sizes; views.
std::vector<at::Tensor> cut_row(const at::Tensor& row, const std::vector<std::vector<std::int64_t>>& sizes);

/// A call of a rank as one line of text: "all_reduce(Float [3, 4], sum)". Calls agree if their lines are equal.
/// `first_free`: the first dimension may differ.
std::string line_of_tensor(const char* verb, const at::Tensor& tensor, const std::string& more,
                           bool first_free = false);
/// The line of a reduction. Throws as check_reducible().
std::string line_of_reduction(const char* verb, const at::Tensor& tensor, ReduceOp reduction,
                              const std::string& more = {});
/// The same for what reduces.
std::string line_of_coalesced(const CoalescedCall& call, const at::Tensor& flat);
std::string line_of_all_to_all(const std::vector<at::Tensor>& parts);
std::string line_of_rooted(const RootedCall& call, const std::vector<at::Tensor>& parts);

[[noreturn]] void throw_different_calls(const std::string& peer, const std::string& call,
                                        const std::string& other_peer, const std::string& other_call);
/// The number of sparse dimensions of a sum: that of the tensors that have entries. `all` has each rank's numbers of entries
/// and of sparse dimensions. Throws if ranks differ in the call `line`.
std::int64_t common_sparse_dim(const std::vector<std::vector<std::int64_t>>& all, const std::string& line,
                               const std::vector<std::string>& peers);

/// Lines are sent in fixed size: longer ones are truncated, and contain a checksum of the whole line.
inline constexpr std::size_t kLineBytes = 192;
using LineBytes = std::array<char, kLineBytes>;
LineBytes pack_line(const std::string& line, std::uint64_t number);
std::string unpack_line(const LineBytes& bytes);

}  // namespace torchspan::collective
