#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>

#include "collective/channels/inbox.h"
#include "collective/channels/messages.h"
#include "collective/world_link.h"

namespace torchspan::collective::channels {

/// Makes a transport that listens, and returns the address that peers dial.
struct Listening {
  std::unique_ptr<net::Transport> transport;
  std::string address;
};
using MakeTransport = std::function<Listening(net::Handler& handler)>;

class Mesh;

/// The connections of one lane: one to each other rank, on one transport and one thread, which
/// receives and decrypts; send() encrypts on the calling thread. Of two ranks, the higher one dials.
class Lane final : private net::Handler {
 public:
  struct Plan {
    int number = 0;
    int rank = 0;
    std::vector<std::string> peers = {};  ///< names of the ranks
    std::uint64_t nonce = 0;              ///< that peers must send to this rank
  };
  /// `inbox` and `mesh`, to which the lane reports, must outlive this object.
  Lane(Executor& executor, Plan plan, Inbox& inbox, Mesh& mesh);
  ~Lane() override;

  void listen(const MakeTransport& make);
  const std::string& address() const { return address_; }

  struct Target {
    std::string address;
    std::uint64_t nonce = 0;
  };
  /// Dials the lower ranks; `targets` by rank.
  void dial(const std::vector<Target>& targets, Deadline deadline);
  bool connected();
  /// The connections that do not exist yet or failed, with reasons; empty if there are none.
  std::vector<std::string> missing();
  /// Whether a connection cannot be made.
  bool refused();

  /// Sends to a connected rank. Throws kDisconnected if the connection has ended.
  void send(int rank, BytesView header, std::span<const Segment> segments);
  std::size_t unsent_bytes(int rank);
  /// Sends the cause for which the group broke, if it did, and `why` as the last messages to every rank; closes the
  /// connections. Ranks that learn of this rank's end first must not take it for the cause.
  void end(const std::string& why, const std::optional<Abort>& cause);
  /// Waits briefly until the peers have what was sent, then ends the thread: no more events follow.
  void stop();

 private:
  struct Peer {
    std::shared_ptr<net::Channel> channel;
    std::string address = {};
    std::uint64_t nonce = 0;  ///< of the peer, if this rank dials
    bool met = false;         ///< it answered with a hello
    bool ended = false;       ///< it sent its last message, or the connection is closed
    std::string trouble = {};
  };

  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void accept(const std::shared_ptr<net::Channel>& channel, const Hello& hello);
  void receive(int rank, const GroupMessage& note, net::Message& message);
  std::optional<int> rank_of(const net::Channel& channel);
  std::shared_ptr<net::Channel> channel_to(int rank);
  void run();

  Executor& executor_;
  const Plan plan_;
  Inbox& inbox_;
  Mesh& mesh_;
  std::string address_;
  Mutex mutex_;
  std::vector<Peer> peers_ TORCHSPAN_GUARDED_BY(mutex_);
  bool ending_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  const std::unique_ptr<Parker> closed_;  ///< unparked when a connection closes
  std::atomic<bool> stopping_{false};
  std::unique_ptr<net::Transport> transport_;
  Thread thread_;
};

struct MeshOptions {
  Duration timeout = std::chrono::minutes(5);
  int lanes = 0;  ///< of this rank; 0: 4 with 8 cores or more, else 2. A group uses the smallest number.
  std::string tag = "torchspan.connections";  ///< of the membership's rounds in which the ranks connect
};

/// Connections between all ranks of a group over several lanes, authenticated by the job's secret or
/// certificates, and encrypted between hosts. Announces the first failure to all ranks. One thread at a time
/// sends and takes; everything else is thread-safe.
class Mesh final {
 public:
  /// Collective over `ranks` of the world, which include this worker. Throws kDisconnected on all ranks,
  /// with the connections that could not be made; kTimedOut.
  Mesh(const std::shared_ptr<WorldLink>& world, std::vector<int> ranks, MeshOptions options);
  /// Sends the last messages and waits briefly until the peers have them.
  ~Mesh();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  Inbox& inbox() { return inbox_; }
  Executor& executor() { return executor_; }

  /// Begins an operation, which all ranks begin in the same order. Its parts must be sent and taken before
  /// the group's timeout.
  void begin_operation();
  /// `calls`: number of the group's call that this rank executes.
  void begin_call(std::uint64_t calls);
  /// Sends a part, which lanes carry in turn. Waits while much is unsent. Throws the group's failure.
  void send(int to, std::uint32_t part, BytesView data);
  /// Waits for a part of `size` bytes.
  Buffer take(int from, std::uint32_t part, std::size_t size);

  /// Breaks the group on all ranks, for calls from `from_call` on: ranks complete earlier ones if they can.
  void abort(const Error& cause, std::uint64_t from_call = 0);
  /// Breaks the group on this rank; others fail when they need more from it.
  void end(const Error& reason);

 private:
  friend class Lane;
  // What lanes report, on their threads: a connection was made, or could not be made; one to a rank broke.
  void changed() { connecting_->unpark(); }
  void lost(int rank, const std::string& why);

  int lane_of(std::uint32_t part) const { return static_cast<int>(part / 2) % lane_count_; }
  std::vector<std::string> listen(WorldLink& world, std::uint64_t nonce);
  std::optional<Error> connect(WorldLink& world, Deadline deadline);
  void agree(WorldLink& world, std::optional<Error> mine, Deadline deadline);
  std::vector<Bytes> gather(WorldLink& world, BytesView mine, Deadline deadline) const;
  void wait_for_room(int to, Lane& lane);
  void stop_lanes(const char* why);

  Executor& executor_;
  const std::shared_ptr<WorldLink> world_;
  const std::vector<int> ranks_;  ///< of the world, by rank of the group
  const MeshOptions options_;
  const int rank_;
  const std::vector<rendezvous::Member> members_;
  const std::vector<std::string> peers_;
  const std::unique_ptr<Parker> connecting_;
  Inbox inbox_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  int lane_count_ = 1;  ///< lanes that all ranks have
  std::uint64_t operation_ = 0;
  std::atomic<std::uint64_t> calls_{0};
  Deadline deadline_ = Deadline::never();
};

}  // namespace torchspan::collective::channels
