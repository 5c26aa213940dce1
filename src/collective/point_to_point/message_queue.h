#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/buffer.h>

#include "collective/channels/messages.h"

namespace torchspan::collective {

/// A send() or recv() of this rank, until its future completes.
struct MessageOperation {
  bool sends = false;
  int peer = 0;
  int tag = 0;
  at::Tensor tensor;     ///< the caller's
  at::Tensor work;       ///< contiguous; the same memory, or a copy
  std::string contents;  ///< "Float [3, 4]"
  Deadline deadline = Deadline::never();
  std::shared_ptr<Promise<at::Tensor>> promise;
  std::uint64_t number = 0;  ///< of the message
  std::size_t moved = 0;     ///< bytes sent or received
  bool accepted = false;     ///< the other rank has made the matching call

  std::size_t bytes() const { return work.nbytes(); }
  const std::byte* data() const { return static_cast<const std::byte*>(work.data_ptr()); }
  /// "send(Float [3, 4] to rank 1, tag 0)".
  std::string call() const;
};
using MessageOperationPtr = std::shared_ptr<MessageOperation>;

/// An offered message that this rank has not received yet.
struct Offered {
  channels::Offer offer;
  Buffer data;  ///< of a small message
};

/// The messages between this rank and one other: matches those that it offers with calls of recv(), per tag in the
/// order of calls. Used by one thread.
class MessageQueue {
 public:
  /// Takes a call of send(), and returns the offer to send.
  channels::Offer add_send(const MessageOperationPtr& operation);
  /// Takes a call of recv(), and returns the offer that it matches.
  std::optional<Offered> add_receive(const MessageOperationPtr& operation);
  /// Returns the call of recv() that an offer with this tag matches; null if there is none yet.
  MessageOperationPtr take_receive(std::uint32_t tag);
  /// Keeps an offer for a later call of recv().
  void keep(Offered offered) { offered_.push_back(std::move(offered)); }
  /// `operation` receives the data of the message.
  void begin_receiving(const MessageOperationPtr& operation, std::uint64_t number);

  /// Throw kInvalid for a number that is not under way.
  MessageOperationPtr sending(std::uint64_t number) const { return find(sending_, number); }
  MessageOperationPtr receiving(std::uint64_t number) const { return find(receiving_, number); }
  void finish(const MessageOperation& operation);

  bool empty() const { return sending_.empty() && receiving_.empty() && waiting_.empty(); }
  void visit(const std::function<void(const MessageOperationPtr&)>& visitor) const;
  /// The messages that the other rank offers and nothing receives: "Float [3] with tag 2"; empty if there are none.
  std::string unmatched() const;
  /// Forgets all operations, and returns them.
  std::deque<MessageOperationPtr> take_all();

 private:
  using Numbered = std::map<std::uint64_t, MessageOperationPtr>;
  static MessageOperationPtr find(const Numbered& operations, std::uint64_t number);

  std::uint64_t next_ = 0;
  Numbered sending_;
  Numbered receiving_;
  std::deque<MessageOperationPtr> waiting_;  ///< calls of recv() without an offer
  std::deque<Offered> offered_;
};

}  // namespace torchspan::collective
