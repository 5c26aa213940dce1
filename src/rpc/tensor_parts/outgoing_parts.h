#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <torchspan/detail/core/mutex.h>

#include "rpc/peers/peer_id.h"
#include "rpc/tensor_parts/split_tensor.h"

namespace torchspan::rpc {

/// Splits large tensors of devices, whose copies to the host then overlap with their way to the peer. Keeps two pinned
/// buffers for each peer and device to which there was such a tensor. Thread-safe.
class OutgoingParts {
 public:
  /// `part`: bytes of a part. Smaller tensors than two parts are not split.
  explicit OutgoingParts(device::EventPoolPtr events, std::size_t part = device::DownloadRing::kPart)
      : events_(std::move(events)), part_(part) {}

  /// Null if the tensor is small, or if many others to that peer are under way.
  SplitTensorPtr split(PeerId to, const at::Tensor& tensor, PartSender sender);
  /// Frees the buffers of the peer, when the last part is gone.
  void departed(PeerId peer);

 private:
  using Key = std::pair<PeerId, std::string>;  ///< and the device
  std::shared_ptr<PartLine> line_to(PeerId to, c10::Device device);

  const device::EventPoolPtr events_;
  const std::size_t part_;
  Mutex mutex_;
  std::map<Key, std::shared_ptr<PartLine>> lines_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t last_number_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::rpc
