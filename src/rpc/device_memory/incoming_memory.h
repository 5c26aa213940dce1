#pragma once
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/mutex.h>

#include "device/api/device_runtime.h"
#include "rpc/device_memory/messages.h"
#include "rpc/peers/peer_id.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

/// The memory of peers that this worker maps, by the peers' numbers. Thread-safe.
class IncomingMemory {
 public:
  /// Called when a tensor has been copied out, on any thread, which may hold locks.
  using Return = std::function<void(PeerId to, std::uint32_t route, std::uint64_t lease)>;
  IncomingMemory(std::shared_ptr<const device::DeviceRuntime> runtime, Return give_back)
      : runtime_(std::move(runtime)), give_back_(std::move(give_back)) {}

  /// Maps a peer's memory for tensors that go to `device`. Throws Error if that is impossible, or for too many
  /// offers of one peer.
  void open(PeerId from, const OfferDeviceMemory& offer, c10::Device device);
  /// Inserts the tensors that a message's blob names among its segments. Destroying the last copy of such a buffer's
  /// owner returns the memory. Throws Error{kInvalid} for places outside of what the peer shared.
  std::vector<wire::DeviceSegment> insert(PeerId from, BytesView blob, std::vector<Buffer>& segments) const;
  /// Unmaps a peer's memory when its last message is gone.
  void departed(PeerId peer);

 private:
  /// One peer has this many pairs of devices, at most.
  static constexpr std::size_t kMostRoutes = 256;
  struct Mapped {
    c10::Device device;
    std::size_t bytes;
    std::shared_ptr<std::byte> memory;
  };
  Mapped find(PeerId from, const SharedPlace& place) const;

  const std::shared_ptr<const device::DeviceRuntime> runtime_;
  const Return give_back_;
  mutable Mutex mutex_;
  std::map<PeerId, std::map<std::uint32_t, Mapped>> mapped_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
