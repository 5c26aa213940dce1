#include "rpc/device_memory/lent_tensor.h"

#include <algorithm>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"

namespace torchspan::rpc {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

/// Where the first free part begins that is large enough.
std::optional<std::size_t> LentArea::free_offset(std::size_t bytes) const {
  if (bytes == 0 || bytes > bytes_) return std::nullopt;
  const std::size_t rounded = round_up(bytes);
  std::size_t offset = 0;
  for (const auto& [begin, part] : parts_) {
    if (begin - offset >= rounded) break;
    offset = begin + part.bytes;
  }
  if (offset > bytes_ || bytes_ - offset < rounded) return std::nullopt;
  return offset;
}

std::optional<Lease> LentArea::take(std::size_t bytes) {
  MutexLock lock(mutex_);
  const std::optional<std::size_t> offset = free_offset(bytes);
  if (!offset) return std::nullopt;
  parts_.emplace(*offset, Part{++last_lease_, round_up(bytes), false});
  return Lease{last_lease_, *offset, bytes};
}

bool LentArea::has_room(std::size_t bytes) const {
  MutexLock lock(mutex_);
  return free_offset(bytes).has_value();
}

bool LentArea::has(std::uint64_t lease) const {
  MutexLock lock(mutex_);
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const auto& entry) { return entry.second.lease == lease; });
}

LentArea::Parts::iterator LentArea::find(std::uint64_t lease) {
  return std::find_if(parts_.begin(), parts_.end(),
                      [&](const auto& entry) { return entry.second.lease == lease; });
}

void LentArea::set_lent(std::uint64_t lease, bool lent) {
  MutexLock lock(mutex_);
  if (const auto part = find(lease); part != parts_.end()) part->second.lent = lent;
}

void LentArea::drop(std::uint64_t lease) {
  MutexLock lock(mutex_);
  if (const auto part = find(lease); part != parts_.end() && !part->second.lent) parts_.erase(part);
}

void LentArea::returned(std::uint64_t lease) {
  MutexLock lock(mutex_);
  const auto part = find(lease);
  const bool never = lease == 0 || lease > last_lease_ || (part != parts_.end() && !part->second.lent);
  if (never) {
    throw_invalid("it returned lease {} of device memory, which it does not hold", lease);
  }
  if (part != parts_.end()) parts_.erase(part);
}

std::size_t LentArea::used() const {
  MutexLock lock(mutex_);
  return parts_.size();
}

at::Tensor LentTensor::view_like(const at::Tensor& tensor) const {
  return device::view_memory(area_->data() + lease_.offset, tensor.sizes(),
                             device::dense_strides_like(tensor), tensor.scalar_type(), tensor.device());
}

}  // namespace torchspan::rpc
