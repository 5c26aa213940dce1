#include "rpc/device_memory/received_memory.h"

#include <exception>
#include <limits>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

namespace torchspan::rpc {
namespace {

constexpr Duration kFullDevicePause = std::chrono::minutes(1);

}  // namespace

std::optional<Buffer> ReceivedMemory::allocate(c10::Device device, std::size_t bytes) {
  Room& room = rooms_.try_emplace(device, Room{ByteBudget(most_)}).first->second;
  if (bytes > std::numeric_limits<std::ptrdiff_t>::max() || executor_.now() < room.full_until)
    return std::nullopt;
  std::shared_ptr<const void> reserved = room.budget.reserve(bytes);
  if (!reserved) return std::nullopt;
  at::Tensor memory;
  try {
    device::StreamsScope scope;
    scope.enter(copies_.in(device));
    memory =
        at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  } catch (const std::exception&) {
    room.full_until = executor_.now() + kFullDevicePause;
    return std::nullopt;
  }
  auto* const data = static_cast<std::byte*>(memory.data_ptr());
  const std::shared_ptr<at::Tensor> owner(new at::Tensor(std::move(memory)),
                                          [reserved = std::move(reserved)](at::Tensor* tensor) mutable {
                                            delete tensor;
                                            reserved.reset();
                                          });
  return Buffer{data, bytes, owner};
}

}  // namespace torchspan::rpc
