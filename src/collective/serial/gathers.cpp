#include "collective/serial/gathers.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/Functions.h>

#include "collective/kernels.h"
#include "collective/tensors.h"

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

namespace {
/// Blocks are padded to the size of the longest up to this size: gathers of one size take log2 P messages.
constexpr std::int64_t kPaddedBlock = std::int64_t{8} << 10;
}  // namespace

void gather_blocks(BlockingCollectives& collectives, const std::vector<at::Tensor>& blocks, int rank) {
  std::int64_t longest = 0;
  for (const at::Tensor& block : blocks) longest = std::max(longest, block.numel());
  if (longest == 0) return;
  if (longest <= kPaddedBlock) {
    const at::Tensor& own = blocks[static_cast<std::size_t>(rank)];
    const at::Tensor mine = at::zeros({longest}, at::TensorOptions().dtype(at::kByte));
    mine.narrow(0, 0, own.numel()).copy_(own);
    const at::Tensor all = empty_bytes({static_cast<std::int64_t>(blocks.size()), longest});
    collectives.all_gather(mine, all);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      blocks[i].copy_(all[static_cast<std::int64_t>(i)].narrow(0, 0, blocks[i].numel()));
    }
    return;
  }
  if (collectives.all_gather_varied(blocks)) return;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].numel() != 0) collectives.broadcast(blocks[i], static_cast<int>(i));
  }
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
  gather_blocks(collectives_, bytes, rank_);
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

void reduce_gathered(BlockingCollectives& collectives, const at::Tensor& tensor, ReduceOp reduction,
                     int ranks) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  const at::Tensor all = empty_bytes({ranks, bytes});
  collectives.all_gather(bytes_of(tensor), all);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < ranks; ++rank) {
    sources.push_back(static_cast<const std::byte*>(all.data_ptr()) + rank * bytes);
  }
  auto* const target = static_cast<std::byte*>(tensor.data_ptr());
  find_kernel(tensor.scalar_type(), reduction)(
      {sources, {&target, 1}, static_cast<std::size_t>(tensor.numel()), static_cast<std::size_t>(ranks)});
}

at::Tensor reduce_sparse(const Gathers& gathers, const at::Tensor& tensor, const std::string& line,
                         std::int64_t divisor, const std::vector<std::string>& peers) {
  const at::Tensor work = tensor.detach().coalesce();
  const std::vector<std::int64_t> sizes = work.sizes().vec();
  const auto all = gathers.numbers({work._nnz(), work.sparse_dim()});
  const std::int64_t sparse_dim = common_sparse_dim(all, line, peers);
  std::vector<std::int64_t> entries;
  for (const auto& theirs : all) entries.push_back(theirs[0]);
  at::Tensor indices = work.indices().t(), values = work.values();
  if (work._nnz() == 0) {
    std::vector<std::int64_t> none(sizes.begin() + sparse_dim, sizes.end());
    none.insert(none.begin(), 0);
    indices = at::empty({0, sparse_dim}, at::TensorOptions().dtype(at::kLong));
    values = at::empty(none, values.options());
  }
  // The first dimension is that of the entries.
  const auto all_indices = gathers.dense(plain(indices), entries);
  const auto all_values = gathers.dense(plain(values), entries);
  return sum_of_sparse(at::cat(all_indices).t(), at::cat(all_values), sizes, divisor);
}

}  // namespace torchspan::collective
