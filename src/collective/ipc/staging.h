#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "collective/device/device_engine.h"

namespace torchspan::collective::ipc {

/// Device memory of every rank of a group, which all of them map: two areas of `area_bytes` each. Exported once,
/// over the control group, whose ranks have proved that they belong to this job. Only this memory is exported,
/// never that of LibTorch's allocator.
class Staging {
 public:
  /// Collective over parts.control; throws on all ranks if one cannot map another's memory.
  Staging(const EngineParts& parts, std::size_t area_bytes);
  /// Unmaps the memory of the others, and gives them time to do the same before its own is freed.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t area_bytes() const { return area_bytes_; }
  /// A range of what a rank contributes, as bytes.
  at::Tensor sent(int rank, std::size_t offset, std::size_t bytes) const { return view(rank, offset, bytes); }
  /// A range of what a rank has reduced.
  at::Tensor reduced(int rank, std::size_t offset, std::size_t bytes) const {
    return view(rank, area_bytes_ + offset, bytes);
  }

 private:
  at::Tensor view(int rank, std::size_t offset, std::size_t bytes) const;

  const EngineParts parts_;
  const std::size_t area_bytes_;
  std::vector<std::shared_ptr<std::byte>> memory_;  ///< by rank
};

/// Memory on a device as a tensor, which does not own it.
at::Tensor device_view(std::byte* data, std::int64_t count, at::ScalarType dtype, c10::Device device);
/// A contiguous tensor as bytes; a view.
at::Tensor device_bytes(const at::Tensor& tensor);

}  // namespace torchspan::collective::ipc
