#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/collective/backend.h>
#include <torchspan/core/error.h>

#include "collective/point_to_point/message_queue.h"
#include "collective/point_to_point/pair_connections.h"

namespace torchspan::collective {

/// Ranks of a group that can send no more, and why, by rank.
using GoneRanks = std::vector<std::optional<Error>>;

/// The errors of send() and recv() of one rank.
class MessageErrors {
 public:
  /// `plan` must outlive this object.
  explicit MessageErrors(const PairPlan& plan) : plan_(plan) {}

  /// `operation` waited until its deadline.
  Error late(const MessageOperation& operation, const MessageQueue& queue, const GoneRanks& gone) const;
  /// What the operation waits for: the other rank and its call.
  std::string awaited(const MessageOperation& operation, const MessageQueue& queue,
                      const GoneRanks& gone) const;
  /// The message does not have the dtype and shape of the tensor.
  Error mismatch(const MessageOperation& operation, const Offered& offered) const;
  /// All ranks from which a recv() from any rank could receive are gone.
  Error no_sender(const MessageOperation& operation, const GoneRanks& gone) const;
  /// A rank sent what it may not send.
  Error invalid(int rank, const Error& cause) const;

 private:
  std::string awaited_from_any(const MessageOperation& operation, const MessageQueue& queue,
                               const GoneRanks& gone) const;
  const std::string& name(int rank) const { return plan_.peers[static_cast<std::size_t>(rank)]; }

  const PairPlan& plan_;
};

/// Moves the messages of one rank. A sender offers its tensor; a small one is sent with the offer, a large one when the
/// receiver has called recv(). The send completes when the receiver has the data. A failure breaks the group, and a
/// broken group fails the messages. One thread handles all messages; it starts with the first one.
class MessageLoop final : private PairEvents {
 public:
  /// Which ranks this rank notifies that its messages have failed.
  enum class Tell : std::uint8_t {
    kNobody,  ///< the other ranks know
    kPeers,   ///< this rank ends, but the group may continue without it
    kGroup,   ///< this rank noticed that the group is broken
  };

  MessageLoop(PairPlan plan, std::shared_ptr<Backend> backend);
  /// Calls stop() if it was not called.
  ~MessageLoop() override;

  const PairPlan& plan() const { return plan_; }
  void add(const MessageOperationPtr& operation);
  /// Fails all operations, later ones too; the first call counts.
  void break_with(const Error& error, Tell tell);
  /// Ends the threads and fails what is left.
  void stop(const Error& error);

 private:
  struct Cause {
    Error error;
    Tell tell;
  };
  struct Lost {
    int rank;
    Error cause;
    Loss how;
  };

  void start();

  // On the thread of the connections:
  void received(int rank, const channels::Note& note, Buffer data) override;
  void lost(int rank, const Error& cause, Loss how) override;
  Deadline look() override;
  void handle(const Lost& lost);
  /// Breaks the group without a rank that it needs; names the process that went first.
  void break_without(int rank, const Error& seen);
  void begin(const MessageOperationPtr& operation);
  void receive(const MessageOperationPtr& operation);
  /// Why a rank can send no more; null: it may.
  const Error* gone(int rank);
  void match(const MessageOperationPtr& operation, const Offered& offered);
  void take_data(const MessageOperationPtr& operation, const Buffer& data);
  void complete(const MessageOperationPtr& operation);
  /// Finds late and missing ranks, and failures of the group; returns when to look again.
  Deadline check();
  void check_senders();
  /// Lists operations that wait as open operations of this worker, for `torchspan stacks`.
  void list_waiting(TimePoint now);
  /// Sends more of the accepted messages; true if some are left.
  bool send_more();
  void fail_all(const Cause& cause);

  const PairPlan plan_;
  const MessageErrors errors_;
  const std::shared_ptr<Backend> backend_;
  Executor& executor_;
  Mutex mutex_;
  bool starting_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::deque<MessageOperationPtr> new_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<Lost> lost_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Cause> cause_ TORCHSPAN_GUARDED_BY(mutex_);
  bool failed_ = false;  ///< of the connections' thread: it has handled cause_
  MessageQueue queue_;   ///< of the same thread
  GoneRanks gone_;       ///< the same
  /// Set once, with the lock; read with the lock until the connections' thread has seen it.
  std::unique_ptr<PairConnections> connections_;
};

}  // namespace torchspan::collective
