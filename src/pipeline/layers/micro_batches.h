#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/pipeline/batch.h>

namespace torchspan::pipeline {

/// Returns the tensor on `device`, for use on this thread's current stream. A copy from the host to a device with streams
/// runs beside the work that this stream already has; the host waits for the copy only.
at::Tensor moved(at::Tensor tensor, c10::Device device);
inline bool is_defined_tensor(const c10::IValue& member) {
  return member.isTensor() && member.toTensor().defined();
}
/// Whether a member is a tensor that is split along its first dimension.
bool has_rows(const Batch& batch, std::size_t member);
/// Returns the size of the first dimension of the tensors that are split. Throws Error{kInvalid}, which names
/// the batch `what`, if the sizes differ, are 0, or if no tensor is split.
std::int64_t count_rows(const Batch& batch, const std::string& what);
/// Returns the sizes of at most `parts` pieces: as even as possible, larger ones first, none 0.
std::vector<std::int64_t> split_rows(std::int64_t rows, int parts);
/// Sums of the sizes of pieces: of all of them, and of those before one of them.
std::int64_t total_rows(const std::vector<std::int64_t>& rows);
std::int64_t rows_before(const std::vector<std::int64_t>& rows, int piece);
/// Returns rows [first, first + rows) of every tensor, as views. Tensors without rows and other members are
/// copied to every slice.
Batch slice(const Batch& batch, std::int64_t first, std::int64_t rows);
/// Joins pieces: concatenates tensors along their first dimension, and stacks tensors without rows. Throws
/// Error{kInvalid} if the pieces have different members, or members that are not tensors differ.
Batch join(const std::vector<Batch>& pieces);

}  // namespace torchspan::pipeline
