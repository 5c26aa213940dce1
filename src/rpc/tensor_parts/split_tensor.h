#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/protocol.h>
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

/// The tensors of one device that wait for their turn with the buffers through which they go to one peer. Thread-safe,
/// except for the buffers, which belong to the first tensor.
class PartLine {
 public:
  using Count = std::shared_ptr<std::atomic<std::size_t>>;
  /// `alive`: the tensors of all lines of the device to the peer that have not been deleted.
  PartLine(std::unique_ptr<PartBuffers> buffers, Count alive)
      : buffers_(std::move(buffers)), alive_(std::move(alive)) {}
  /// Adds a tensor at the end. Returns false if too many others have not been deleted.
  bool enter(std::uint64_t number);
  bool is_first(std::uint64_t number) const;
  /// The tensor needs the buffers no longer.
  void leave(std::uint64_t number);
  /// The tensor is deleted.
  void forget(std::uint64_t number);
  PartBuffers& buffers() { return *buffers_; }

 private:
  /// Tensors beyond these are copied as a whole. The receiver relies on this limit.
  static constexpr std::size_t kMostTensors = 16;
  const std::unique_ptr<PartBuffers> buffers_;
  const Count alive_;
  mutable Mutex mutex_;
  std::deque<std::uint64_t> waiting_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// What the parts say of the worker that sends them.
struct PartSender {
  std::uint64_t instance = 0;
  std::uint16_t version = kWireProtocol.newest;  ///< of the wire format, common to both workers
};

/// A large tensor of an outgoing message that goes to the peer in parts, before the message: the device copies a part
/// while another one is being sent. Its destructor asks the peer to drop the parts, unless the message
/// was sent. One thread at a time may use it.
class SplitTensor {
 public:
  /// The way of one worker's tensors to a peer.
  struct Route {
    std::shared_ptr<PartLine> line;
    PartSender sender;
    std::uint64_t number = 0;  ///< of the tensor, among those to the peer; it has entered the line
  };
  /// Copies the tensor on its device: its values after the work of this thread's current stream so far.
  SplitTensor(Route route, const at::Tensor& tensor, const device::EventPoolPtr& events);
  ~SplitTensor();
  SplitTensor(const SplitTensor&) = delete;
  SplitTensor& operator=(const SplitTensor&) = delete;

  /// The dense copy on the device; undefined once all parts were sent.
  const at::Tensor& captured() const { return captured_; }
  std::uint64_t number() const { return route_.number; }
  /// Begins to copy parts for which there are buffers, if it is its turn.
  void fill();
  /// Whether advance() would send a part or begin to copy one. Does not wait.
  bool can_advance() const;
  /// Sends the parts that the device has written to `channel`, always the same one, and begins to copy others. Returns
  /// the bytes of the parts in host memory, which the channel carries. Throws Error if the channel does not accept a
  /// part.
  std::size_t advance(const std::shared_ptr<net::Channel>& channel);
  /// Whether all parts were sent.
  bool done() const { return sent_ == total_; }
  bool sent_on(const net::Channel* channel) const { return channel_.get() == channel; }
  /// The message is on its way: the peer keeps the parts for it.
  void message_sent() { channel_.reset(); }
  /// Bytes that the device was asked to copy, and bytes that were sent.
  std::size_t copied() const { return copied_; }
  std::size_t sent() const { return sent_; }

 private:
  void send(const std::optional<Part>& part) const;

  const Route route_;
  at::Tensor captured_;
  std::optional<device::Mark> captured_at_;  ///< until the buffers' stream waits for it
  const std::size_t total_;                  ///< bytes
  std::size_t copied_ = 0, sent_ = 0;
  std::shared_ptr<net::Channel> channel_;  ///< has parts that the peer may have to forget
};
using SplitTensorPtr = std::shared_ptr<SplitTensor>;

}  // namespace torchspan::rpc
