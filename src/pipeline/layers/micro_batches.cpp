#include "pipeline/layers/micro_batches.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/device/streams.h>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {
namespace {

/// Whether two members that are not tensors are the same; unlike ==, also two values that are not a number.
bool is_same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble() && std::isnan(a.toDouble())) return std::isnan(b.toDouble());
  return a == b;
}

/// Throws unless `piece` has as many members as `first`, tensors in the same places, and otherwise the same values.
void check_alike(const Batch& first, const Batch& piece, std::size_t number) {
  bool alike = piece.members.size() == first.members.size();
  for (std::size_t i = 0; alike && i < first.members.size(); ++i)
    alike = piece.members[i].isTensor() == first.members[i].isTensor();
  if (!alike) {
    throw_invalid(
        "the outputs of micro-batches 0 and {} cannot be joined: each must have the same members, and a "
        "tensor where the other has one",
        number);
  }
  for (std::size_t i = 0; i < first.members.size(); ++i) {
    if (first.members[i].isTensor() || is_same(first.members[i], piece.members[i])) continue;
    throw_invalid(
        "member {} of the output is not a tensor and differs between micro-batches 0 and {}, so it cannot be "
        "joined: return it as a tensor",
        i, number);
  }
}

}  // namespace

at::Tensor moved(at::Tensor tensor, c10::Device device) {
  if (device::has_streams(tensor.device()))  // the thread that received it may have another current stream
    device::keep_memory_for(tensor, device::current_stream(tensor.device()));
  if (tensor.device() == device) return tensor;
  if (!tensor.is_cpu() || !device::has_streams(device)) return tensor.to(device);
  return device::CopyStreams().to_device(tensor, device);
}

bool has_rows(const Batch& batch, std::size_t member) {
  const c10::IValue& value = batch.members[member];
  return value.isTensor() && value.toTensor().defined() && value.toTensor().dim() > 0 &&
         !batch.is_unsplit(member);
}

std::int64_t count_rows(const Batch& batch, const std::string& what) {
  std::optional<std::int64_t> rows;
  for (std::size_t i = 0; i < batch.members.size(); ++i) {
    if (!has_rows(batch, i)) continue;
    const std::int64_t here = batch.members[i].toTensor().size(0);
    if (rows && *rows != here) {
      throw_invalid(
          "the tensors of the {} have different first dimensions: {} and {} (member {}); mark a tensor "
          "without a batch dimension with Batch::mark_unsplit(member)",
          what, *rows, here, i);
    }
    rows = here;
  }
  if (!rows) throw_invalid("the {} has no tensor with rows to split", what);
  if (*rows == 0) throw_invalid("the {} has no rows", what);
  return *rows;
}

std::vector<std::int64_t> split_rows(std::int64_t rows, int parts) {
  const std::int64_t pieces = std::min<std::int64_t>(rows, parts);
  std::vector<std::int64_t> sizes;
  for (std::int64_t piece = 0; piece < pieces; ++piece)
    sizes.push_back(rows / pieces + (piece < rows % pieces ? 1 : 0));
  return sizes;
}

std::int64_t total_rows(const std::vector<std::int64_t>& rows) {
  return rows_before(rows, static_cast<int>(rows.size()));
}

std::int64_t rows_before(const std::vector<std::int64_t>& rows, int piece) {
  return std::accumulate(rows.begin(), rows.begin() + piece, std::int64_t{0});
}

Batch slice(const Batch& batch, std::int64_t first, std::int64_t rows) {
  Batch piece = batch;
  for (std::size_t i = 0; i < piece.members.size(); ++i) {
    if (has_rows(batch, i)) piece.members[i] = batch.members[i].toTensor().narrow(0, first, rows);
  }
  return piece;
}

Batch join(const std::vector<Batch>& pieces) {
  if (pieces.size() == 1) return pieces.front();
  Batch whole = pieces.empty() ? Batch() : pieces.front();
  for (std::size_t piece = 1; piece < pieces.size(); ++piece) check_alike(whole, pieces[piece], piece);
  for (std::size_t member = 0; member < whole.members.size(); ++member) {
    if (!whole.members[member].isTensor()) continue;
    std::vector<at::Tensor> tensors;
    for (const Batch& piece : pieces) tensors.push_back(piece.members[member].toTensor());
    whole.members[member] = has_rows(whole, member) ? at::cat(tensors) : at::stack(tensors);
  }
  return whole;
}

}  // namespace torchspan::pipeline
