#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/spans.h>

#include "collective/channels/messages.h"

namespace torchspan::collective {

/// MessageOperation::peer of a recv() from any rank, until a message matches it.
inline constexpr int kNoPeer = -1;

/// A send() or recv() of this rank, until its future completes.
struct MessageOperation {
  bool sends = false;
  bool from_any = false;  ///< recv() from any rank
  int peer = kNoPeer;
  int tag = 0;
  at::Tensor tensor = {};     ///< the caller's
  at::Tensor work = {};       ///< contiguous; the same memory, or a copy
  std::string contents = {};  ///< "Float [3, 4]"
  TimePoint began = {};
  Deadline deadline = Deadline::never();
  std::shared_ptr<Promise<at::Tensor>> promise = nullptr;
  std::shared_ptr<Promise<ReceivedMessage>> promise_from_any = nullptr;  ///< in its place
  std::uint64_t number = 0;                                              ///< of the message
  std::size_t moved = 0;                                                 ///< bytes sent or received
  bool accepted = false;                        ///< the other rank has made the matching call
  std::unique_ptr<SpanScope> listed = nullptr;  ///< while it is listed as an open operation

  std::size_t bytes() const { return work.nbytes(); }
  const std::byte* data() const { return static_cast<const std::byte*>(work.data_ptr()); }
  /// "send(Float [3, 4] to rank 1, tag 0)".
  std::string call() const;
  /// Complete the future.
  void succeed();
  void fail(const Error& error);
};
using MessageOperationPtr = std::shared_ptr<MessageOperation>;

/// A message that rank `rank` offers and this rank has not received yet.
struct Offered {
  int rank = 0;
  channels::Offer offer;
  Buffer data = {};  ///< of a small message
};

/// The messages between this rank and the others of its group. Matches offers with calls of recv() of the same tag: an
/// offer with the earliest call for its rank or for any rank, a call with the offer that arrived first. Used by one thread.
class MessageQueue {
 public:
  /// Takes a call of send(), and returns the offer to send.
  channels::Offer add_send(const MessageOperationPtr& operation);
  /// Takes a call of recv(), and returns the offer that it matches.
  std::optional<Offered> add_receive(const MessageOperationPtr& operation);
  /// Returns the call of recv() that an offer of this rank and tag matches; null if there is none yet.
  MessageOperationPtr take_receive(int rank, std::uint32_t tag);
  /// Keeps an offer for a later call of recv().
  void keep(Offered offered) { offered_.push_back(std::move(offered)); }
  /// Drops the offers of a rank that is gone.
  void drop_offers(int rank);
  /// `operation` receives the data of message `number` of this rank.
  void begin_receiving(const MessageOperationPtr& operation, int rank, std::uint64_t number);

  /// Throw kInvalid for a number whose data is neither sent nor received now.
  MessageOperationPtr sending(int rank, std::uint64_t number) const { return find(sending_, {rank, number}); }
  MessageOperationPtr receiving(int rank, std::uint64_t number) const {
    return find(receiving_, {rank, number});
  }
  void finish(const MessageOperation& operation);

  /// Whether an operation cannot complete without this rank.
  bool needs(int rank) const;
  /// The earliest call of recv() from any rank that no offer has matched; null if there is none.
  MessageOperationPtr first_from_any() const;
  void visit(const std::function<void(const MessageOperationPtr&)>& visitor) const;
  /// The messages that a rank offers and nothing receives: "Float [3] with tag 2"; empty if there are none.
  std::string unmatched(int rank) const;
  /// Forgets all operations, and returns them.
  std::deque<MessageOperationPtr> take_all();

 private:
  using Key = std::pair<int, std::uint64_t>;  ///< rank and number
  using Numbered = std::map<Key, MessageOperationPtr>;
  static MessageOperationPtr find(const Numbered& operations, const Key& key);

  std::map<int, std::uint64_t> next_;  ///< number of the next message to a rank
  Numbered sending_;
  Numbered receiving_;
  std::deque<MessageOperationPtr> waiting_;  ///< calls of recv() without an offer, in the order of calls
  std::deque<Offered> offered_;              ///< in the order of arrival
};

}  // namespace torchspan::collective
