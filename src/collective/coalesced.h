#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/collective/backend.h>

/// Several tensors as one.
namespace torchspan::collective {

/// "all_reduce_coalesced", ….
std::string_view name_of(CoalescedCall::Verb verb);
/// "[2, 3], [4]".
std::string shapes_of(const std::vector<at::Tensor>& tensors);

/// The tensors as the rows of one, each of which has 1/`rows` of every tensor; in new memory unless there is one
/// tensor, which is contiguous.
at::Tensor join_rows(const std::vector<at::Tensor>& tensors, std::int64_t rows);
/// Cuts a row of join_rows() into tensors of these sizes; views.
std::vector<at::Tensor> cut_row(const at::Tensor& row, const std::vector<std::vector<std::int64_t>>& sizes);

}  // namespace torchspan::collective
