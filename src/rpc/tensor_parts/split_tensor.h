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

#include "rpc/tensor_parts/part_buffers.h"

namespace torchspan::rpc {

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
  struct Way {
    std::shared_ptr<PartLine> line;
    PartSender sender;
    std::uint64_t number = 0;  ///< of the tensor, among those to the peer; it has entered the line
  };
  /// Copies the tensor on its device: its values after the work of this thread's current stream so far.
  SplitTensor(Way way, const at::Tensor& tensor, const device::EventPoolPtr& events);
  ~SplitTensor();
  SplitTensor(const SplitTensor&) = delete;
  SplitTensor& operator=(const SplitTensor&) = delete;

  /// The dense copy on the device; undefined once all parts were sent.
  const at::Tensor& captured() const { return captured_; }
  std::uint64_t number() const { return way_.number; }
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

  const Way way_;
  at::Tensor captured_;
  std::optional<device::Mark> captured_at_;  ///< until the buffers' stream waits for it
  const std::size_t total_;                  ///< bytes
  std::size_t copied_ = 0, sent_ = 0;
  std::shared_ptr<net::Channel> channel_;  ///< has parts that the peer may have to forget
};
using SplitTensorPtr = std::shared_ptr<SplitTensor>;

}  // namespace torchspan::rpc
