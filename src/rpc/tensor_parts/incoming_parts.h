#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

#include "rpc/tensor_parts/messages.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

/// The tensors of which parts have arrived, until their message comes, by connection. Their memory is in use only as
/// far as parts have arrived. Used by the thread that polls the transport. Errors are Error{kInvalid, kOverloaded}: the
/// peer broke the protocol, and its connection must end.
class IncomingParts {
 public:
  /// A TensorPart has arrived with these segments.
  void receive(const net::Channel* channel, const TensorPart& part, const std::vector<Buffer>& segments);
  /// Inserts the tensors that a message's blob names among its segments, and moves the places in `on_device`.
  void insert(const net::Channel* channel, BytesView blob, std::vector<Buffer>& segments,
              std::vector<wire::DeviceSegment>& on_device);
  /// The connection has ended: frees what arrived on it.
  void closed(const net::Channel* channel) { channels_.erase(channel); }
  /// How many tensors wait for their message or for other parts.
  std::size_t waiting() const;

 private:
  /// Senders have at most 16 at a time for each of their devices.
  static constexpr std::size_t kMostTensors = 256;
  struct Partial {
    Buffer memory;
    std::size_t received = 0;
  };
  using Tensors = std::map<std::uint64_t, Partial>;  ///< by number
  static Partial& begin(Tensors& tensors, const TensorPart& part);
  static Buffer take(Tensors& tensors, std::uint64_t number);

  std::map<const net::Channel*, Tensors> channels_;
};

}  // namespace torchspan::rpc
