#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "collective/channels/messages.h"
#include "collective/world_link.h"

namespace torchspan::collective {

/// How a rank was lost.
enum class Loss : std::uint8_t {
  kAbsence,  ///< it left, or no connection to it could be made
  kFailure,  ///< the connection broke, or it sent an invalid message
};

/// What PairConnections report, on their thread.
class PairEvents {
 public:
  virtual ~PairEvents() = default;
  /// `data` is empty if the message has none. Throws kInvalid for a message that the rank may not send.
  virtual void received(int rank, const channels::Note& note, Buffer data) = 0;
  /// No connection to the rank can be made, or it has ended.
  virtual void lost(int rank, const Error& cause, Loss how) = 0;
  /// Called after events and wake(), and at the time that it returned last.
  virtual Deadline look() = 0;
};

/// The ranks of a group between which single messages pass.
struct PairPlan {
  std::shared_ptr<WorldLink> world;
  std::vector<int> ranks;                ///< of the world, by rank of the group
  std::vector<std::uint64_t> instances;  ///< of the ranks' processes
  std::vector<std::string> peers;        ///< names for messages
  int rank = 0;
  std::uint64_t group = 0;  ///< differs for every group of these ranks
  Duration timeout = std::chrono::minutes(5);
};

/// Connections between this rank and single other ranks of a group, each made when both ranks have asked for it, with
/// the authentication and encryption of Membership::listen(). Of two ranks, the higher one dials. One thread dials and
/// receives.
class PairConnections final : private net::Handler {
 public:
  /// Listens and starts the thread. `events` must outlive this object. Throws kCancelled if the world has ended.
  PairConnections(PairPlan plan, PairEvents& events);
  ~PairConnections() override;

  /// Connects to a rank as soon as it does the same. On the connections' thread.
  void open(int rank);
  /// Sends now, or when the rank is connected; drops the message if the rank is lost. Segments have `keep`.
  void send(int rank, const channels::Note& note, std::optional<Segment> segment = std::nullopt);
  std::size_t unsent_bytes(int rank);
  /// Makes the thread call look().
  void wake() { transport_->wake(); }
  /// Sends `last` to all connected ranks and closes the connections.
  void end(const channels::Note& last);
  /// Ends the threads, after the peers have received what was sent, or briefly after.
  void stop();

 private:
  struct Unsent {
    Bytes header;
    std::optional<Segment> segment;
  };
  struct Peer {
    std::shared_ptr<net::Channel> channel;
    std::uint64_t nonce = 0;  ///< that the peer's hello must have
    bool opened = false;
    bool met = false;    ///< it answered with a hello
    bool ready = false;  ///< everything that was queued is sent
    bool ended = false;  ///< it sent its last message
    std::deque<Unsent> queue = {};
  };

  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  /// A rank and this one have asked for a connection, or never will.
  struct Meeting {
    int rank;
    std::vector<Bytes> both;  ///< their nonces and addresses, by rank of the world
    std::optional<Error> failure;
  };
  /// Passes meetings from the membership's thread to that of the connections, which may end first.
  struct Meetings {
    Mutex mutex;
    net::Transport* transport TORCHSPAN_GUARDED_BY(mutex) =
        nullptr;  ///< to wake; null: the connections have ended
    std::vector<Meeting> pending TORCHSPAN_GUARDED_BY(mutex) = {};
  };

  void run();
  void connect_pending();
  void connect(const Meeting& meeting);
  void lost(int rank, const Error& cause, Loss how);
  void meet(const std::shared_ptr<net::Channel>& channel, const channels::Hello& hello);
  void send_queued(int rank);
  std::optional<int> rank_of(const net::Channel& channel);
  bool connected();

  const PairPlan plan_;
  PairEvents& events_;
  Executor& executor_;
  std::uint64_t nonce_ = 0;
  std::string address_;
  const std::unique_ptr<Parker> closed_;  ///< unparked when a connection closes
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ending_{false};
  Mutex mutex_;
  std::vector<Peer> peers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unique_ptr<net::Transport> transport_;
  const std::shared_ptr<Meetings> meetings_ = std::make_shared<Meetings>();
  Thread thread_;
};

}  // namespace torchspan::collective
