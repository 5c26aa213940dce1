#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>

#include "collective/channels/messages.h"
#include "collective/world_link.h"

namespace torchspan::collective::channels {

class GroupLinks;

/// How a connection to a rank ended.
enum class LinkEnd : std::uint8_t {
  kNeverMet,  ///< the rank had not answered yet
  kExpected,  ///< one of the two ranks ended it
  kLost,
};

/// What GroupLinks report, on their thread and without a lock.
class LinkListener {
 public:
  /// The rank has answered: from now on, send() reaches it.
  virtual void on_met(GroupLinks& links, int rank) = 0;
  /// Throws Error{kInvalid} for a message that the rank may not send; on_invalid() follows.
  virtual void on_group_message(GroupLinks& links, int rank, const GroupMessage& message,
                                std::vector<Buffer> segments) = 0;
  virtual void on_invalid(GroupLinks& links, int rank, const Error& cause) = 0;
  virtual void on_end(GroupLinks& links, int rank, LinkEnd how, const Error& reason) = 0;
  /// Called after events and after wake(); returns when to call it again at the latest.
  virtual Deadline poll() { return Deadline::never(); }

 protected:
  ~LinkListener() = default;
};

struct LinksPlan {
  std::string name;         ///< of the address; differs for all that listen in this process
  int ranks = 0;            ///< of the group
  int rank = 0;             ///< this one
  std::uint64_t nonce = 0;  ///< that ranks which dial must send
  int number = 0;           ///< tells several links of one group apart
};

/// Connections from this rank to other ranks of a group: at most one to each, on one transport and one thread, which
/// receives and decrypts; send() encrypts on the calling thread. Of two ranks, the higher one dials. Both begin with a
/// hello, whose probe shows whether the path drops large packets. Authenticated and encrypted as Membership::listen() is.
class GroupLinks final : private net::Handler {
 public:
  /// Listens, and starts the thread, which reports to `listener`; that must outlive this object. Throws kCancelled if the
  /// world has ended.
  GroupLinks(WorldLink& world, LinksPlan plan, LinkListener& listener);
  /// Calls stop().
  ~GroupLinks() override;

  const std::string& address() const { return address_; }
  std::uint64_t nonce() const { return plan_.nonce; }
  int number() const { return plan_.number; }
  /// A number that differs for every group of every process; ranks that dial an old address present another.
  static std::uint64_t make_nonce(const WorldLink& world, std::uint64_t salt = 0);

  /// Connects to a lower rank, which listens at `address` for `nonce`; on_met() follows, or on_end().
  void dial(int rank, const std::string& address, std::uint64_t nonce, Deadline deadline);
  /// Whether the rank has answered, though its connection may have ended since.
  bool has_met(int rank);
  /// Null if there is no connection, or it has ended.
  std::shared_ptr<net::Channel> channel_to(int rank);
  std::size_t unsent_bytes(int rank);
  /// Makes the thread call poll().
  void wake() { transport_->wake(); }
  /// Sends the cause for which the group broke, if it did, and `why` as the last messages to every rank; closes the
  /// connections. Ranks that learn of this rank's end first must not take it for the cause. The first call counts.
  void end(const std::string& why, const std::optional<Abort>& cause);
  /// Calls end(), waits briefly until the ranks have what was sent, and ends the thread: no more events follow.
  void stop(const std::string& why, const std::optional<Abort>& cause);

 private:
  struct Peer {
    std::shared_ptr<net::Channel> channel;
    std::uint64_t nonce = 0;  ///< of the peer, if this rank dials
    bool met = false;         ///< it answered with a hello
    bool ended = false;       ///< it sent its last message
  };

  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void accept(const std::shared_ptr<net::Channel>& channel, const Hello& hello);
  std::optional<int> rank_of(const net::Channel& channel);
  bool has_connections();
  void run();

  Executor& executor_;
  const LinksPlan plan_;
  LinkListener& listener_;
  std::string address_;
  Mutex mutex_;
  std::vector<Peer> peers_ TORCHSPAN_GUARDED_BY(mutex_);
  bool ending_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  const std::unique_ptr<Parker> closed_;  ///< unparked when a connection closes
  std::atomic<bool> stopping_{false};
  std::unique_ptr<net::Transport> transport_;
  Thread thread_;
};

}  // namespace torchspan::collective::channels
