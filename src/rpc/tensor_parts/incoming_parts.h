#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

#include "rpc/device_memory/received_memory.h"
#include "rpc/tensor_parts/messages.h"

namespace torchspan::rpc {

/// The tensors of which parts have arrived, until their message comes, by connection. If parts are in device memory, they
/// wait on that device if it has room, otherwise in host memory, which is in use only as far as parts have arrived. Used
/// by the thread that polls the transport. Errors are Error{kInvalid, kOverloaded} if the peer broke the protocol, and
/// those of a device that failed; the connection must end.
class IncomingParts {
 public:
  IncomingParts(device::CopyStreams& copies, ReceivedMemory& received)
      : copies_(copies), received_(received) {}
  /// A TensorPart has arrived with these segments. `device`: where its only segment is, if it is in device memory. Waits
  /// for the copy.
  void receive(const net::Channel* channel, const TensorPart& part, const std::vector<Buffer>& segments,
               std::optional<c10::Device> device = std::nullopt);
  /// Inserts the tensors that a message's blob names among its segments.
  void insert(const net::Channel* channel, BytesView blob, ReceivedSegments segments);
  /// The connection has ended: frees what arrived on it.
  void closed(const net::Channel* channel) { channels_.erase(channel); }
  /// How many tensors wait for their message or for other parts.
  std::size_t waiting() const;

 private:
  /// Senders have at most 16 at a time for each of their devices.
  static constexpr std::size_t kMostTensors = 256;
  struct Partial {
    Buffer memory;
    c10::Device device = c10::kCPU;
    std::size_t received = 0;
    bool stays = false;  ///< on the host: the device had no room
  };
  using Tensors = std::map<std::uint64_t, Partial>;  ///< by number
  Partial& begin(Tensors& tensors, const TensorPart& part, std::optional<c10::Device> device);
  Partial allocate(std::uint64_t bytes, std::optional<c10::Device> device);
  void move_to(c10::Device device, Partial& partial);
  void copy(const Buffer& from, c10::Device device, const Partial& to);
  static Partial take(Tensors& tensors, std::uint64_t number);

  device::CopyStreams& copies_;
  ReceivedMemory& received_;
  std::map<const net::Channel*, Tensors> channels_;
};

}  // namespace torchspan::rpc
