#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rpc/worker_backend.h>

#include "rpc/device_memory/incoming_memory.h"
#include "rpc/device_memory/outgoing_memory.h"
#include "rpc/device_memory/received_memory.h"

namespace torchspan::rpc {

struct AgentState;
struct IncomingCall;

/// Carries tensors between devices of workers: on one host through device memory that both map, between hosts over
/// connections that carry device memory. Makes and answers the offers, and returns memory. The worker's agent owns it;
/// buffers of messages may outlive both. Thread-safe.
class DeviceMemory final : public std::enable_shared_from_this<DeviceMemory> {
 public:
  /// Runs a short job after a delay on the thread that polls the transport, while the agent lives. Not on the pool, all
  /// of whose threads may run handlers that wait for tensors that wait for the memory to return.
  using RunAfter = std::function<void(Duration, UniqueFunction<void()>)>;
  /// Null if the worker has no runtime for its devices, or does not use such memory.
  static std::shared_ptr<DeviceMemory> make(AgentState& state, RunAfter run_after);
  DeviceMemory(AgentState& state, std::shared_ptr<const device::DeviceRuntime> runtime, RunAfter run_after);

  /// The way of a tensor to a device of a peer. Without both, it must go through host memory, maybe only this time.
  struct Route {
    LentTensorPtr lent = nullptr;  ///< memory for it
    /// Not 0: the connection carries a copy of it from device to device, which keeps `room`.
    std::uint32_t device_target = 0;
    std::shared_ptr<const void> room = nullptr;
  };
  /// `there`: the peer's device; the CPU: where the peer's map places it. `carries`: whether the tensor's connection
  /// carries device memory.
  Route route_to(PeerId to, const at::Tensor& tensor, c10::Device there, bool carries);
  /// The memory of which route_to() lends parts, if the peer has mapped it.
  std::optional<SharedArea> area_to(PeerId to, c10::Device here, c10::Device there) const;
  /// See IncomingMemory::insert().
  void insert(PeerId from, BytesView blob, ReceivedSegments segments) const {
    incoming_->insert(from, blob, segments);
  }
  /// Memory for a tensor that a connection carries, which no work of its device uses: see ReceivedMemory. Without data if
  /// the device has no room. Throws Error{kInvalid} for a target that the peer did not offer. For the thread that polls.
  Buffer receive(PeerId from, std::uint32_t target, std::size_t bytes);

  /// Returns memory of which no message has buffers any longer to its owners now, instead of soon. Costs nothing if there
  /// is none. Call it on the thread that polls the transport.
  void send_returns();

  OfferAnswer answer(const IncomingCall& call, const OfferDeviceMemory& offer);
  void returned(PeerId by, const ReleaseDeviceMemory& release);
  void departed(PeerId peer, const ProcessId& process);

 private:
  class OfferSent;
  class ReturnSent;
  using Returns = std::map<std::pair<PeerId, std::uint32_t>, std::vector<std::uint64_t>>;
  /// Below, two copies and a message that returns the memory cost more than the way through the host.
  static constexpr std::size_t kMinBytesOnDevice = std::size_t{64} << 10;

  std::shared_ptr<const void> room_on(c10::Device device, std::size_t bytes);
  void send_offer(PeerId to, OfferDeviceMemory offer);
  void offer_answered(PeerId by, const OfferDeviceMemory& offer, const OfferAnswer& answer);
  void begin_again_later(PeerId to, std::uint32_t route);
  void give_back(PeerId to, std::uint32_t route, std::uint64_t lease);
  bool reads_parts(PeerId peer) const;
  void return_failed(PeerId to, ReleaseDeviceMemory release);
  void free_ended_later(const std::shared_ptr<WorkerBackend>& agent);

  AgentState& state_;  ///< alive while `agent_` is
  const std::weak_ptr<WorkerBackend> agent_;
  const std::shared_ptr<const device::DeviceRuntime> runtime_;
  const RunAfter run_after_;
  Counter& shared_;    ///< tensors, and parts of others, that were sent
  Counter& received_;  ///< those that were received and returned
  OutgoingMemory outgoing_;
  std::unique_ptr<IncomingMemory> incoming_;  ///< set by make()
  std::atomic<bool> watching_{false};
  Mutex mutex_;
  std::map<std::string, ByteBudget> carried_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< copies that are being sent, by device
  Returns returns_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<bool> returning_{false};  ///< there are some
};

}  // namespace torchspan::rpc
