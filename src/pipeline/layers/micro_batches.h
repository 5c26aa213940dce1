#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/pipeline/batch.h>

namespace torchspan::pipeline {

/// Whether a member is a tensor that is split along its first dimension.
bool has_rows(const Batch& batch, std::size_t member);
/// The first dimension of the tensors that are split. Throws Error{kInvalid}, calling the batch `what`, when
/// they differ, when there is none, or when it is 0.
std::int64_t count_rows(const Batch& batch, const std::string& what);
/// Sizes of at most `parts` pieces, as even as they can be, larger ones first; none is 0.
std::vector<std::int64_t> split_rows(std::int64_t rows, int parts);
/// Rows [first, first + rows) of every tensor, as views; tensors without rows and other members go to all.
Batch slice(const Batch& batch, std::int64_t first, std::int64_t rows);
/// The pieces one after the other: tensors joined along their first dimension, those without rows stacked,
/// other members from the first piece.
Batch join(const std::vector<Batch>& pieces);

}  // namespace torchspan::pipeline
