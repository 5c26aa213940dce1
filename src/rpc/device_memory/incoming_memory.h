#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/mutex.h>

#include "device/api/device_runtime.h"
#include "rpc/device_memory/messages.h"
#include "rpc/device_memory/received_memory.h"
#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// The memory of peers that this worker maps, by the peers' numbers; and on which devices tensors arrive that a
/// connection carries from device to device. Thread-safe.
class IncomingMemory {
 public:
  /// Called when a tensor has been copied out, on any thread, which may hold locks.
  using Return = std::function<void(PeerId to, std::uint32_t route, std::uint64_t lease)>;
  IncomingMemory(std::shared_ptr<const device::DeviceRuntime> runtime, Return give_back)
      : runtime_(std::move(runtime)), give_back_(std::move(give_back)) {}

  /// Maps a peer's memory for tensors that go to `device`. Throws Error if that is impossible, or for too many
  /// offers of one peer.
  void open(PeerId from, const OfferDeviceMemory& offer, c10::Device device);
  /// The same for a route over a connection: remembers `device`. Replaces an earlier such offer for the same devices, whose
  /// answer was lost.
  void accept(PeerId from, const OfferDeviceMemory& offer, c10::Device device);
  /// Where tensors of such a route go. Throws Error{kInvalid} for a route that the peer did not offer.
  c10::Device device_of(PeerId from, std::uint32_t route) const;
  /// Inserts the tensors that a message's blob names among its segments. Destroying the last copy of such a buffer's
  /// owner returns the memory. Throws Error{kInvalid} for places outside of what the peer shared.
  void insert(PeerId from, BytesView blob, ReceivedSegments segments) const;
  /// Unmaps a peer's memory when its last message is gone.
  void departed(PeerId peer);

 private:
  /// One peer has this many pairs of devices, at most.
  static constexpr std::size_t kMostRoutes = 256;
  struct Mapped {
    c10::Device device;
    std::size_t bytes = 0;
    std::shared_ptr<std::byte> memory = nullptr;  ///< null: tensors come over the connection
    std::string devices = {};                     ///< those of the offer, then
  };
  void check_new(PeerId from, std::uint32_t route) TORCHSPAN_REQUIRES(mutex_);
  Mapped find(PeerId from, std::uint32_t route) const;

  const std::shared_ptr<const device::DeviceRuntime> runtime_;
  const Return give_back_;
  mutable Mutex mutex_;
  std::map<PeerId, std::map<std::uint32_t, Mapped>> mapped_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint32_t, std::uint32_t> departed_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< the last incarnation of each rank
};

}  // namespace torchspan::rpc
