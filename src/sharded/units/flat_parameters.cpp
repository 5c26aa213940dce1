#include "sharded/units/flat_parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

FlatParameters::FlatParameters(const std::vector<NamedParameter>& parameters, FlatLayout layout,
                               const collective::Group& group, std::shared_ptr<BufferPool> pool)
    : layout_(std::move(layout)), group_(group), pool_(std::move(pool)) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = parameters[0].tensor.options().requires_grad(false);
  part_ = at::zeros({layout_.part_size()}, options);
  full_ = at::empty({layout_.size()}, options);
  set_memory(pool_->take(layout_.size(), options));
  full_.zero_();
  for (const NamedParameter& parameter : parameters) add(parameter);
}

void FlatParameters::add(const NamedParameter& parameter) {
  const auto& [name, tensor] = parameter;
  const std::size_t index = entries_.size();
  const Segment& segment = layout_.segments()[layout_.segment_of(index)];
  const std::int64_t count = tensor.numel(), offset = layout_.offset(index) - segment.begin;
  const std::int64_t from = segment.chunk * group_.rank(), to = from + segment.chunk;
  const std::int64_t begin = std::clamp(from, offset, offset + count);
  const std::int64_t end = std::clamp(to, offset, offset + count);
  Entry entry{name, tensor, {tensor.sizes().vec(), begin - offset, end - offset}, {}, {}};
  entry.full = full_.narrow(0, layout_.offset(index), count).view(tensor.sizes()).variable_data();
  entry.part = part_.narrow(0, segment.part + (begin < end ? begin - from : 0), end - begin).variable_data();
  entry.full.copy_(tensor);
  tensor.set_data(entry.full);
  entries_.push_back(std::move(entry));
}

at::Tensor FlatParameters::in_memory(const Segment& segment) const {
  return memory_.narrow(0, segment.begin + segment.chunk * group_.rank(), segment.chunk);
}

at::Tensor FlatParameters::in_part(const Segment& segment) const {
  return part_.narrow(0, segment.part, segment.chunk);
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
  for (const Segment& segment : layout_.segments()) in_part(segment).copy_(in_memory(segment));
}

void FlatParameters::free() {
  if (!gathers_.empty()) end_gather();
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

/// The shared segment first: its length is that of no other unit, so a rank that gathers another one fails here.
void FlatParameters::begin_gather() {
  if (gathered_ || !gathers_.empty()) return;
  check_unchanged();
  const at::NoGradGuard no_grad;
  memory_ = pool_->take(layout_.size(), part_.options());
  const std::vector<Segment>& segments = layout_.segments();
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
    in_memory(*segment).copy_(in_part(*segment));
    gathers_.emplace_back(group_, memory_.narrow(0, segment->begin, segment->chunk * group_.size()),
                          segment->chunk);
  }
}

void FlatParameters::end_gather() {
  if (gathers_.empty()) return;
  for (PartGather& gather : std::exchange(gathers_, {})) gather.wait();
  const at::NoGradGuard no_grad;
  set_memory(memory_);
  for (const Entry& entry : entries_) entry.tensor.set_data(entry.full);
  gathered_ = true;
}

}  // namespace torchspan::sharded
