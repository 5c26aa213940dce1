#pragma once
#include <cstddef>
#include <memory>
#include <optional>

#include <torchspan/detail/net/transport.h>

#include "device/api/copy_rings.h"
#include "rpc/device_memory/lent_tensor.h"

namespace torchspan::rpc {

/// A part of a tensor that its device has written.
struct Part {
  Segment segment;               ///< in host memory, unless `lent`
  LentTensorPtr lent = nullptr;  ///< device memory that the peer maps
  std::size_t bytes() const { return lent ? lent->bytes() : segment.size; }
};

/// The memory through which large tensors of one device go to a peer in parts. One thread at a time may use it.
class PartBuffers {
 public:
  virtual ~PartBuffers() = default;
  /// The stream of the copies. Make it wait for the tensor before fill().
  virtual const c10::Stream& stream() const = 0;
  /// Whether fill() has room for a part of a tensor of which `rest` bytes are left. Forgets parts that the channel or the
  /// peer no longer needs.
  virtual bool has_room(std::size_t rest) = 0;
  /// Begins to copy the next part of a dense tensor, from a byte on. Returns the part's bytes; 0 if there is no room.
  virtual std::size_t fill(const at::Tensor& tensor, std::size_t from) = 0;
  /// Whether take() returns a part. Does not wait.
  virtual bool ready() const = 0;
  /// The oldest part, when the device has written it. Its memory is free again when the part is destroyed and, if it was
  /// sent, the channel has released it or the peer has returned it.
  virtual std::optional<Part> take() = 0;
  /// The part was sent.
  virtual void sent(const Part& part, const std::shared_ptr<net::Channel>& channel) = 0;
  /// Forgets the parts that were not taken.
  virtual void discard() = 0;
};

/// Two pinned buffers of the host.
class HostBuffers final : public PartBuffers {
 public:
  /// `part`: bytes of a part.
  HostBuffers(c10::Device device, std::size_t part) : ring_(device, part) {}
  const c10::Stream& stream() const override { return ring_.stream(); }
  bool has_room(std::size_t) override { return ring_.has_room(); }
  std::size_t fill(const at::Tensor& tensor, std::size_t from) override;
  bool ready() const override { return ring_.ready(); }
  std::optional<Part> take() override;
  void sent(const Part&, const std::shared_ptr<net::Channel>&) override {}
  void discard() override { ring_.discard(); }

 private:
  device::DownloadRing ring_;
};

}  // namespace torchspan::rpc
