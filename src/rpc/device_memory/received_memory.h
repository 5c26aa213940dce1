#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>

#include <c10/core/Device.h>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/device/copies.h>

#include "rpc/device_memory/byte_budget.h"

namespace torchspan::rpc {

/// Memory of devices for tensors that wait until their handlers or callers take them. Used by one thread; the memory may
/// be freed on any other one.
class ReceivedMemory {
 public:
  /// `most`: bytes that wait on each device. One tensor may be larger.
  explicit ReceivedMemory(device::CopyStreams& copies, Executor& executor,
                          std::size_t most = std::size_t{1} << 30)
      : copies_(copies), executor_(executor), most_(most) {}

  /// Memory whose owner is a std::shared_ptr<at::Tensor> of bytes, and belongs to the stream for copies to the device.
  /// Nullopt if the device has no room, and for a minute after that, because each attempt empties LibTorch's allocator.
  std::optional<Buffer> allocate(c10::Device device, std::size_t bytes);

 private:
  struct Room {
    ByteBudget budget;
    TimePoint full_until = TimePoint::min();
  };
  device::CopyStreams& copies_;
  Executor& executor_;
  const std::size_t most_;
  std::unordered_map<c10::Device, Room> rooms_;
};

}  // namespace torchspan::rpc
