#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/device/copies.h>

#include "wire/api/tensors.h"

namespace torchspan::rpc {

/// Limits the bytes that are in use at a time. Thread-safe; reservations may outlive it.
class ByteBudget {
 public:
  explicit ByteBudget(std::size_t most) : most_(most) {}

  /// Reserves bytes until the last copy of the result is gone; null if they are too many. A single reservation may be
  /// larger than the limit.
  std::shared_ptr<const void> reserve(std::size_t bytes) const {
    std::size_t used = used_->load();
    do {
      if (used != 0 && (used > most_ || bytes > most_ - used)) return nullptr;
    } while (!used_->compare_exchange_weak(used, used + bytes));
    return {used_.get(), [counted = used_, bytes](const void*) { counted->fetch_sub(bytes); }};
  }

 private:
  const std::size_t most_;
  const std::shared_ptr<std::atomic<std::size_t>> used_ = std::make_shared<std::atomic<std::size_t>>(0);
};

/// The segments of a received message, and which of them are in device memory, by ascending index.
struct ReceivedSegments {
  std::vector<Buffer>& all;
  std::vector<wire::DeviceSegment>& on_device;

  /// Inserts a buffer at `index`, which is at most all.size(). `device`: if it is in device memory.
  void insert(std::size_t index, Buffer buffer, std::optional<c10::Device> device,
              wire::DeviceSegment::Memory memory) const {
    all.insert(all.begin() + static_cast<std::ptrdiff_t>(index), std::move(buffer));
    auto later = on_device.begin();
    while (later != on_device.end() && later->index < index) ++later;
    for (auto other = later; other != on_device.end(); ++other) ++other->index;
    if (device) on_device.insert(later, {index, *device, memory});
  }
};

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
