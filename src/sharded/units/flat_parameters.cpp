#include "sharded/units/flat_parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

std::int64_t FlatParameters::needed_chunk(const std::vector<NamedParameter>& parameters, int ranks) {
  std::int64_t count = 0;
  for (const NamedParameter& parameter : parameters) count += parameter.tensor.numel();
  return std::max<std::int64_t>((count + ranks - 1) / ranks, 1);
}

FlatParameters::FlatParameters(const std::vector<NamedParameter>& parameters, const collective::Group& group,
                               std::shared_ptr<BufferPool> pool, std::int64_t chunk)
    : group_(group), pool_(std::move(pool)), chunk_(chunk) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = parameters[0].tensor.options().requires_grad(false);
  part_ = at::zeros({chunk_}, options);
  full_ = at::empty({size()}, options);
  set_memory(pool_->take(size(), options));
  full_.zero_();
  const std::int64_t from = chunk_ * group_.rank(), to = from + chunk_;
  std::int64_t offset = 0;
  for (const auto& [name, tensor] : parameters) {
    const std::int64_t count = tensor.numel();
    const std::int64_t begin = std::clamp(from, offset, offset + count);
    const std::int64_t end = std::clamp(to, offset, offset + count);
    Entry entry{name, tensor, {tensor.sizes().vec(), begin - offset, end - offset}, offset, {}, {}};
    entry.full = full_.narrow(0, offset, count).view(tensor.sizes()).variable_data();
    entry.part = part_.narrow(0, begin < end ? begin - from : 0, end - begin).variable_data();
    entry.full.copy_(tensor);
    tensor.set_data(entry.full);
    entries_.push_back(std::move(entry));
    offset += count;
  }
}

void FlatParameters::set_memory(at::Tensor memory) {
  c10::StorageImpl* storage = full_.storage().unsafeGetStorageImpl();
  void* data = memory.defined() ? memory.data_ptr() : nullptr;
  storage->set_data_ptr_noswap(c10::DataPtr(data, full_.device()));
  storage->set_nbytes(memory.defined() ? memory.nbytes() : 0);
  memory_ = std::move(memory);
}

void FlatParameters::broadcast() {
  const at::NoGradGuard no_grad;
  group_.broadcast(memory_, 0).wait();
}

void FlatParameters::keep_changes() {
  const at::NoGradGuard no_grad;
  part_.copy_(memory_.narrow(0, chunk_ * group_.rank(), chunk_));
}

void FlatParameters::free() {
  if (gather_.running()) end_gather();
  if (!gathered_) return;
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) entry.tensor.set_data(entry.part);
  gathered_ = false;
  at::Tensor memory = memory_;
  set_memory({});
  pool_->give(std::move(memory));
}

void FlatParameters::check_unchanged() const {
  for (const Entry& entry : entries_) {
    const bool same =
        entry.tensor.storage().unsafeGetStorageImpl() == part_.storage().unsafeGetStorageImpl() &&
        entry.tensor.storage_offset() == entry.part.storage_offset() &&
        entry.tensor.sizes() == entry.part.sizes() && entry.tensor.scalar_type() == part_.scalar_type();
    if (same) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' was moved, converted or replaced after FullyShardedDataParallel divided "
                    "it; convert the module before it is wrapped, and change values in place",
                    entry.name));
  }
}

void FlatParameters::begin_gather() {
  if (gathered_ || gather_.running()) return;
  check_unchanged();
  const at::NoGradGuard no_grad;
  memory_ = pool_->take(size(), part_.options());
  memory_.narrow(0, chunk_ * group_.rank(), chunk_).copy_(part_);
  gather_ = PartGather(group_, memory_, chunk_);
}

void FlatParameters::end_gather() {
  if (!gather_.running()) return;
  gather_.wait();
  const at::NoGradGuard no_grad;
  set_memory(memory_);
  for (const Entry& entry : entries_) entry.tensor.set_data(entry.full);
  gathered_ = true;
}

}  // namespace torchspan::sharded
