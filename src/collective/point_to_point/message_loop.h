#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/collective.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>

#include "collective/channels/group_links.h"
#include "collective/channels/messages.h"
#include "collective/point_to_point/message_queue.h"
#include "collective/world_link.h"

namespace torchspan::collective {

/// How a rank departed.
enum class Departure : std::uint8_t {
  kAbsence,  ///< it left, or no connection to it could be made
  kFailure,  ///< the connection broke, or it sent an invalid message
};

class MessageLoop;

/// The ranks of a group between which single messages pass.
struct PairPlan {
  std::shared_ptr<WorldLink> world;
  GroupMembers members;
  int rank = 0;
  std::uint64_t group = 0;  ///< differs for every group of these ranks
  Duration timeout = std::chrono::minutes(5);
};

/// The GroupLinks over which single messages pass. Each connection is made when both ranks have asked for it.
class PairConnections final : private channels::LinkListener {
 public:
  /// Reports to `loop`, which must outlive this object. Throws kCancelled if the world has ended.
  PairConnections(PairPlan plan, MessageLoop& loop);
  ~PairConnections();

  /// Connects to a rank as soon as it does the same. On the connections' thread.
  void open(int rank);
  /// Sends now, or when the rank is connected; drops the message if the rank is lost. Segments have `keep`.
  void send(int rank, const channels::GroupMessage& message, std::optional<Segment> segment = std::nullopt);
  std::size_t unsent_bytes(int rank) { return links_.unsent_bytes(rank); }
  void wake() { links_.wake(); }
  /// As those of GroupLinks.
  void end(const std::string& why) { links_.end(why, std::nullopt); }
  void stop(const std::optional<channels::Abort>& cause);

 private:
  struct Unsent {
    Bytes header;
    std::optional<Segment> segment;
  };
  struct Peer {
    bool opened = false;
    bool ready = false;  ///< everything that was queued is sent
    std::deque<Unsent> queue = {};
  };
  /// A rank and this one have asked for a connection, or never will.
  struct MutualRequest {
    int rank;
    std::vector<Bytes> both;  ///< their nonces and addresses, by rank of the world
    std::optional<Error> failure;
  };
  /// Passes requests from the membership's thread to that of the connections, which may end first.
  struct MutualRequests {
    Mutex mutex;
    channels::GroupLinks* links TORCHSPAN_GUARDED_BY(mutex) = nullptr;  ///< to wake; null: they have ended
    std::vector<MutualRequest> pending TORCHSPAN_GUARDED_BY(mutex) = {};
  };

  void on_met(channels::GroupLinks&, int rank) override { send_queued(rank); }
  void on_group_message(channels::GroupLinks&, int rank, const channels::GroupMessage& message,
                        std::vector<Buffer> segments) override;
  void on_invalid(channels::GroupLinks&, int rank, const Error& cause) override;
  void on_end(channels::GroupLinks&, int rank, channels::LinkEnd how, const Error& reason) override;
  Deadline poll() override;
  void connect_pending();
  void connect(const MutualRequest& request);
  void departed(int rank, const Error& cause);
  void send_queued(int rank);
  void send_now(int rank, const Unsent& message);

  const PairPlan plan_;
  MessageLoop& loop_;
  Executor& executor_;
  Mutex mutex_;
  std::vector<Peer> peers_ TORCHSPAN_GUARDED_BY(mutex_);
  const std::shared_ptr<MutualRequests> requests_ = std::make_shared<MutualRequests>();
  channels::GroupLinks links_;
};

/// Ranks of a group that can send no more, and why, by rank.
using DepartedRanks = std::vector<std::optional<Error>>;

/// The errors of send() and recv() of one rank.
class MessageErrors {
 public:
  /// `plan` must outlive this object.
  explicit MessageErrors(const PairPlan& plan) : plan_(plan) {}

  /// `operation` waited until its deadline.
  Error late(const MessageOperation& operation, const MessageQueue& queue,
             const DepartedRanks& departed) const;
  /// What the operation waits for: the other rank and its call.
  std::string awaited(const MessageOperation& operation, const MessageQueue& queue,
                      const DepartedRanks& departed) const;
  /// The message does not have the dtype and shape of the tensor.
  Error mismatch(const MessageOperation& operation, const Offered& offered) const;
  /// All ranks from which a recv() from any rank could receive are gone.
  Error no_sender(const MessageOperation& operation, const DepartedRanks& departed) const;
  /// A rank sent what it may not send.
  Error invalid(int rank, const Error& cause) const;

 private:
  std::string awaited_from_any(const MessageOperation& operation, const MessageQueue& queue,
                               const DepartedRanks& departed) const;
  const std::string& name(int rank) const { return plan_.members.name(rank); }

  const PairPlan& plan_;
};

/// Moves the messages of one rank. A sender offers its tensor; a small one is sent with the offer, a large one when the
/// receiver has called recv(). The send completes when the receiver has the data. A failure breaks the group, and a
/// broken group fails the messages. One thread handles all messages; it starts with the first one.
class MessageLoop final {
 public:
  /// Which ranks this rank notifies that its messages have failed.
  enum class Tell : std::uint8_t {
    kNobody,  ///< the other ranks know
    kPeers,   ///< this rank ends, but the group may continue without it
    kGroup,   ///< this rank noticed that the group is broken
  };

  MessageLoop(PairPlan plan, std::shared_ptr<Backend> backend);
  /// Calls stop() if it was not called.
  ~MessageLoop();

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
  struct Departed {
    int rank;
    Error cause;
    Departure how;
  };

  friend class PairConnections;

  void start();

  // On the thread of the connections:
  /// `data` is empty if the message has none. Throws kInvalid for a message that the rank may not send.
  void received(int rank, const channels::GroupMessage& note, Buffer data);
  /// No connection to the rank can be made, or it has ended.
  void departed(int rank, const Error& cause, Departure how);
  /// Called after events and wake(), and at the time that it returned last.
  Deadline poll();
  void handle(const Departed& departed);
  /// Breaks the group without a rank that it needs; names the process that went first.
  void break_without(int rank, const Error& seen);
  void begin(const MessageOperationPtr& operation);
  void receive(const MessageOperationPtr& operation);
  /// Why a rank can send no more; null: it may.
  const Error* cause_of_departure(int rank);
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
  std::optional<channels::Abort> announcement();

  const PairPlan plan_;
  const MessageErrors errors_;
  const std::shared_ptr<Backend> backend_;
  Executor& executor_;
  Mutex mutex_;
  bool starting_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::deque<MessageOperationPtr> new_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<Departed> departed_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Cause> cause_ TORCHSPAN_GUARDED_BY(mutex_);
  bool failed_ = false;                ///< of the connections' thread: it has handled cause_
  MessageQueue queue_;                 ///< of the same thread
  DepartedRanks causes_of_departure_;  ///< the same
  /// Set once, with the lock; read with the lock until the connections' thread has seen it.
  std::unique_ptr<PairConnections> connections_;
};

}  // namespace torchspan::collective
