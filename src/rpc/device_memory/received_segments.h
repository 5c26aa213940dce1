#pragma once
#include <optional>
#include <utility>
#include <vector>

#include <torchspan/detail/core/buffer.h>

#include "wire/api/tensors.h"

namespace torchspan::rpc {

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

}  // namespace torchspan::rpc
