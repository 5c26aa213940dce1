#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torchspan/detail/core/mutex.h>

#include "rpc/peers/peer_table.h"
#include "rpc/tensor_parts/shared_buffers.h"
#include "rpc/tensor_parts/split_tensor.h"

namespace torchspan::rpc {

/// Splits large tensors of devices, whose copies then overlap with their way to the peer. Keeps the buffers of each way
/// on which there was such a tensor: from a device to a peer through host memory, or through an area. Thread-safe.
class OutgoingParts {
 public:
  /// `part`: bytes of a part in host memory.
  OutgoingParts(device::EventPoolPtr events, SharedBuffers::IsOpen is_open,
                std::size_t part = device::DownloadRing::kPart)
      : events_(std::move(events)), is_open_(std::move(is_open)), part_(part) {}

  /// Null if the tensor is smaller than two parts of the host or one of the area, if many others of its device to that
  /// peer have not been sent, or if the peer has departed. `shared`: the area through which the parts may go; its size
  /// determines theirs.
  SplitTensorPtr split(PeerId to, const at::Tensor& tensor, PartSender sender,
                       const std::optional<SharedArea>& shared = std::nullopt);
  /// Frees the buffers of the peer when the last part is gone. From now on, its tensors are not split.
  void departed(PeerId peer);

 private:
  struct Key {
    PeerId to;
    std::string device;
    std::uint32_t route = 0;  ///< of the area; 0: through host memory
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  std::shared_ptr<PartLine> line_to(PeerId to, c10::Device device, const std::optional<SharedArea>& shared);

  const device::EventPoolPtr events_;
  const SharedBuffers::IsOpen is_open_;
  const std::size_t part_;
  Mutex mutex_;
  std::map<Key, std::shared_ptr<PartLine>> lines_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::pair<PeerId, std::string>, PartLine::Count> alive_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< by device
  /// By rank, the last incarnation that has departed.
  std::map<std::uint32_t, std::uint32_t> departed_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t last_number_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::rpc
