#include "collective/serial/gathers.h"

#include <cstring>

#include <ATen/Functions.h>

namespace torchspan::collective {

at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, at::kByte);
}

at::Tensor bytes_of(void* data, std::size_t size) {
  return at::from_blob(data, {static_cast<std::int64_t>(size)}, at::kByte);
}

at::Tensor empty_bytes(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kByte));
}

std::vector<std::vector<std::int64_t>> Gathers::numbers(std::vector<std::int64_t> mine) const {
  const std::size_t bytes = mine.size() * sizeof(std::int64_t);
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(size_));
  collectives_.all_gather(bytes_of(mine.data(), bytes),
                          at::from_blob(all.data(), {size_, static_cast<std::int64_t>(bytes)}, at::kByte));
  std::vector<std::vector<std::int64_t>> by_rank;
  for (auto at = all.begin(); at != all.end(); at += static_cast<std::ptrdiff_t>(mine.size())) {
    by_rank.emplace_back(at, at + static_cast<std::ptrdiff_t>(mine.size()));
  }
  return by_rank;
}

std::vector<at::Tensor> Gathers::dense(const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& rows) const {
  std::vector<at::Tensor> results;
  for (int rank = 0; rank < size_; ++rank) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    if (!sizes.empty()) sizes[0] = rows[static_cast<std::size_t>(rank)];
    results.push_back(rank == rank_ ? tensor.clone() : at::empty(sizes, tensor.options()));
  }
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& result : results) bytes.push_back(bytes_of(result));
  if (collectives_.all_gather_varied(bytes)) return results;
  for (int rank = 0; rank < size_; ++rank) {
    const at::Tensor& its = bytes[static_cast<std::size_t>(rank)];
    if (its.numel() != 0) collectives_.broadcast(its, rank);
  }
  return results;
}

std::vector<at::Tensor> Gathers::dense(const at::Tensor& tensor) const {
  std::vector<std::int64_t> rows;
  for (const auto& theirs : numbers({tensor.dim() == 0 ? 1 : tensor.size(0)})) rows.push_back(theirs[0]);
  return dense(tensor, rows);
}

std::vector<Bytes> Gathers::bytes(BytesView mine) const {
  const at::Tensor tensor = empty_bytes({static_cast<std::int64_t>(mine.size())});
  if (!mine.empty()) std::memcpy(tensor.data_ptr(), mine.data(), mine.size());
  std::vector<Bytes> all;
  for (const at::Tensor& theirs : dense(tensor)) {
    const auto* data = static_cast<const std::byte*>(theirs.data_ptr());
    all.emplace_back(data, data + theirs.nbytes());
  }
  return all;
}

}  // namespace torchspan::collective
