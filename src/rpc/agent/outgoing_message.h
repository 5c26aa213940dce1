#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rpc/extension.h>

#include "rpc/device_memory/lent_tensor.h"
#include "rpc/peers/peer_id.h"
#include "rpc/tensor_parts/outgoing_parts.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

using TensorPtr = std::shared_ptr<at::Tensor>;

/// A message to be sent: its frame, and the tensors that the frame describes.
struct OutgoingMessage {
  wire::Frame frame;
  std::vector<TensorPtr> captured =
      {};  ///< to this worker itself: copies on their devices, which the receiver takes
  std::vector<LentTensorPtr> lent = {};    ///< memory of some tensors, freed after the copies in `tensors`
  std::vector<SplitTensorPtr> split = {};  ///< tensors that are sent in parts, before the frame
  /// A tensor that the connection carries from device to device.
  struct Carried {
    TensorPtr copy;
    std::uint32_t target = 0;  ///< Segment::device_target
  };
  std::vector<Carried> carried = {};
  enum class Way : std::uint8_t { kLent, kSplit, kCarried };
  std::vector<Way> ways = {};  ///< of the tensors in these three lists, in the order of the message
  wire::PackedTensors tensors = {};
  std::exception_ptr failure = nullptr;  ///< an Error: why not all parts were sent

  /// Whether the frame may be sent: its tensors are in host memory, or with the peer.
  bool ready() {
    return tensors.copies.complete() &&
           std::ranges::all_of(split, [](const SplitTensorPtr& tensor) { return tensor->done(); });
  }
};

/// The message of a call that was queued on a channel that was not open: it has reached nobody, and can be sent on another
/// channel to the same process.
struct UnsentCall {
  OutgoingMessage out;
  PeerId peer;
  bool creates = false;  ///< its first handle is that of the reference that it creates
  std::shared_ptr<net::Channel> channel;
  std::string first_failure = {};
  std::string failure = {};  ///< why attempts to connect failed: the first reason, and the last one
};

}  // namespace torchspan::rpc
