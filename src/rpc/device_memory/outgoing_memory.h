#pragma once
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/mutex.h>

#include "device/api/device_runtime.h"
#include "rpc/device_memory/lent_tensor.h"
#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// An area, and the number of its route.
struct SharedArea {
  std::shared_ptr<LentArea> area;
  std::uint32_t route = 0;
  Counter* sent = nullptr;  ///< counts parts, unless null
};

/// This worker's memory through which its tensors reach devices of others: one area for each peer, device here
/// and device there, so that no peer maps what another one receives. A state machine: callers send the offers
/// that it returns, and pass it the answers. Thread-safe.
class OutgoingMemory {
 public:
  /// `bytes`: of each area.
  OutgoingMemory(std::shared_ptr<const device::DeviceRuntime> runtime, std::size_t bytes)
      : runtime_(std::move(runtime)), bytes_(bytes) {}

  struct Shared {
    LentTensorPtr tensor = nullptr;  ///< null: it must go another way
    std::optional<OfferDeviceMemory> offer =
        std::nullopt;                 ///< the first on a new route: send this to the peer
    std::uint32_t device_target = 0;  ///< not 0: the connection carries it
  };
  /// Memory for a tensor of `bytes` bytes on `here` that goes to a peer's device `there`; the CPU: where the
  /// peer's device map places it.
  Shared share(PeerId to, c10::Device here, c10::Device there, std::size_t bytes);
  /// The area of that route, if the peer has mapped it.
  std::optional<SharedArea> area_to(PeerId to, c10::Device here, c10::Device there) const;

  /// The peer has answered an offer. Returns the next one, if there is one. May allocate device memory. `failure`
  /// is set to why tensors of this route go through host memory, if this should be logged.
  std::optional<OfferDeviceMemory> answered(PeerId by, std::uint32_t route, const OfferAnswer& answer,
                                            std::string& failure);
  /// The peer has accepted an offer of tensors that the connection carries from device to device.
  void use_connection(PeerId by, std::uint32_t route);
  /// Whether this worker had no device memory for the route. lost() allows another attempt.
  bool lacks_memory(PeerId to, std::uint32_t route);
  /// The offer was lost: the next tensor begins again.
  void lost(PeerId to, std::uint32_t route);
  /// Throws Error{kInvalid} for memory that the peer never got.
  void returned(PeerId by, const ReleaseDeviceMemory& release);

  /// Keeps a peer's areas until its process has ended: until then its device may still read them.
  void departed(PeerId peer, const ProcessId& process);
  /// Frees those of processes that have ended. Returns whether there are others.
  bool free_ended();
  /// How many areas there are, those of departed peers included.
  std::size_t areas() const;

 private:
  struct Key {
    PeerId to;
    std::string here, there;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  enum class State { kAsking, kOffering, kReady, kRefused, kNoMemory, kConnection };
  struct Route {
    Key key;
    c10::Device here;
    State state = State::kAsking;
    std::shared_ptr<LentArea> area = nullptr;
  };
  struct Kept {
    ProcessId process;
    std::shared_ptr<LentArea> area;
  };
  OfferDeviceMemory offer_of(std::uint32_t number, const Route& route) const;
  Route* find(PeerId peer, std::uint32_t number) TORCHSPAN_REQUIRES(mutex_);
  std::optional<OfferDeviceMemory> allocate(PeerId by, std::uint32_t number, OfferDeviceMemory offer,
                                            c10::Device here, std::string& failure);

  const std::shared_ptr<const device::DeviceRuntime> runtime_;
  const std::size_t bytes_;
  mutable Mutex mutex_;
  std::uint32_t last_route_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<Key, std::uint32_t> numbers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint32_t, Route> routes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Kept> kept_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
