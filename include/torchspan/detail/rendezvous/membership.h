#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/protocol.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/net.h>

namespace torchspan::rendezvous {

/// One worker of the world, as it described itself when it joined.
struct Member {
  std::string name;
  int rank = 0;
  std::string address;         ///< listening address that peers dial
  std::uint64_t instance = 0;  ///< random id of this registration; differs after a restart
  std::string host;            ///< host name, for messages
  std::string host_id;         ///< equal only on one boot of one machine; a hint, not proof
  std::int64_t pid = 0;
  std::uint64_t start_ticks = 0;  ///< process start in kernel ticks; detects reused pids
  std::int64_t uid = 0;
  std::uint64_t functions_digest = 0;
  std::uint32_t incarnation = 0;  ///< number of processes that held this rank before; set by the store
  ProtocolRange wire = {};        ///< of its messages to other workers (docs/wire.md)
};

/// State of a member; see Membership::condition().
enum class Condition : std::uint8_t {
  kPresent,
  kStopped,  ///< stopped by a signal or a debugger: silent, but alive
  kDead,
  kLeft,
};

/// MembershipOptions::rank in an open world: the store assigns the lowest rank that was never used.
inline constexpr int kAnyRank = -1;
/// MembershipOptions::world_size of an open world, which workers may join and leave at any time.
inline constexpr int kOpenWorld = 0;

/// Formats a worker for messages: "worker1 (rank 1, pid 4711 on node3)".
std::string describe(const Member& member);

/// What Membership::sum() returns.
struct CountSums {
  struct Note {
    int rank = 0;
    std::vector<std::byte> bytes;
  };
  std::vector<std::uint64_t> counts;
  std::vector<Note> notes;  ///< of the lowest ranks that gave one, at most kMostNotes
  std::uint64_t noted = 0;  ///< how many ranks gave one
  static constexpr std::size_t kMostNotes = 16;
};

/// Makes the transport of one endpoint for `handler`: "store", "<worker>.membership", or
/// "<worker>.direct.<use>" for Membership::listen().
using TransportFactory =
    std::function<std::unique_ptr<net::Transport>(const std::string& endpoint, net::Handler& handler)>;

/// Socket transports on one host, with small limits, authenticated by `secret`.
TransportFactory stream_transports(Executor& executor, net::Secret secret);
/// Transports between hosts, over TLS.
TransportFactory tls_transports(Executor& executor, net::Secret secret, net::TlsOptions tls = {});

struct MembershipOptions {
  std::string name;    ///< 1 to 127 of A-Z a-z 0-9 _ . : -
  int rank = 0;        ///< or kAnyRank
  int world_size = 1;  ///< or kOpenWorld
  /// Address of the store: "tcp:127.0.0.1:29500", "tls:node0:29500", "unix:/path", "sim:store". Port 0 on rank 0: a
  /// free one, which `store_ready` gets.
  std::string store_address;
  std::string store_listen;  ///< where rank 0 listens, if different; else empty
  /// Called on rank 0 before it waits for the others, with the address of the store that they need.
  std::function<void(const std::string& store_address)> store_ready = {};
  std::string address;         ///< this worker's listening address, advertised to all
  std::string job;             ///< the store of another job rejects this worker, unaffected
  std::uint64_t instance = 0;  ///< 0: drawn from the system's random source
  std::uint64_t functions_digest = 0;
  std::vector<std::string> functions;  ///< "name signature", behind the digest
  /// Rejects workers with other functions. If both sides allow differences, only a function that both have with
  /// different signatures is rejected.
  bool require_same_functions = true;
  ProtocolRange wire = kWireProtocol;    ///< the worker announces it; without a common version it cannot join
  ProtocolRange store = kStoreProtocol;  ///< of this worker's connection to the store, and of rank 0's store
  Duration timeout = std::chrono::seconds(60);
  /// Interval of the store's heartbeats to workers on other hosts; a worker is dead after `dead_after`
  /// without an answer. Rank 0's values apply to all. On rank 0's host the end of a connection is the
  /// signal.
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration dead_after = std::chrono::seconds(5);  ///< at least two heartbeats
  std::string host_id;                            ///< empty: this boot of this machine
};

/// Membership of a world. Rank 0 serves a small store; every worker, rank 0 included, is its client over an
/// authenticated connection. A worker is dead when its connection ends or, on another host, is silent for
/// `dead_after`. One client thread, and one more on rank 0; both idle without traffic on one host. Methods
/// are thread-safe; blocking ones (barrier, all_gather_bytes, leave) throw kInvalid inside callbacks. A
/// fixed world of size 1 opens no connection.
class Membership {
 public:
  using JoinCallback = std::function<void(const Member& member)>;
  using DeathCallback = std::function<void(const Member& member, const Error& reason)>;
  using DepartureCallback = std::function<void(const Member& member)>;
  /// Callbacks of watch(); empty ones are skipped.
  struct Callbacks {
    JoinCallback joined = {};
    DeathCallback died = {};
    DepartureCallback left = {};
    /// If set, the callbacks are destroyed after the object has ended.
    std::optional<std::weak_ptr<const void>> owner = {};
  };

  /// Limit of a collective round, and progress reports while it waits. Without `report`, the first of the ranks that
  /// wait logs a warning with the missing ones after 10 s, 20 s, 40 s, ….
  struct Wait {
    Deadline until;
    Duration every = Duration::zero();  ///< zero: no reports
    /// Called on the waiting thread about every `every` with the missing members, by rank. A throw ends the
    /// wait.
    std::function<void(const std::vector<Member>& missing)> report = {};
    /// Called there instead if the store has not answered for `every`.
    std::function<void()> no_answer = {};
    /// Of a gather: these ranks gather with this tag only once, and nothing of it is kept afterwards.
    bool once = false;
  };

  /// Joins the world.
  /// Fixed world: returns when all `world_size` workers have joined, or throws on every worker that tried: kTimedOut
  /// naming missing and present workers; kInvalid for a duplicate name or rank, a different world size or function
  /// table (naming both sides), a bad name, a port in use; kDenied for another secret; kUnsupported for a release
  /// without a common protocol version; kDisconnected if a worker died. Later a worker with the rank and name of a dead
  /// or departed one may replace it. Workers may start in any order.
  /// Open world: rank 0 joins at once and must stay. Others join at any time, or wait for rank 0 until `timeout`
  /// (kTimedOut). A name or rank of a present member is rejected (kInvalid, naming it). The name of a dead or departed
  /// member brings its rank; that rank may also be taken under a new name.
  /// A worker that a running world rejects does not affect it.
  static std::unique_ptr<Membership> join(Runtime& runtime, TransportFactory transports,
                                          MembershipOptions options);

  /// Without leave(), other workers see this worker die. Ends the threads within a second.
  ~Membership();
  Membership(const Membership&) = delete;

  /// This worker, with the rank and incarnation assigned by the store.
  const Member& self() const;
  bool open() const;
  /// Latest holder of each rank, in rank order, including dead and departed ones. A fixed world has all its
  /// ranks, an open world only the used ones.
  std::vector<Member> members() const;
  /// Size of members().
  int world_size() const;
  /// Throws kInvalid that lists the existing names.
  Member member(std::string_view name) const;
  /// Throws kInvalid that lists the existing ranks.
  Member member(int rank) const;
  /// Whether the latest holder of `rank` has neither died nor left, as far as this worker knows; false for
  /// an unused rank of an open world. Throws kInvalid for an impossible rank.
  bool is_present(int rank) const;
  /// Like is_present(), with kStopped if the member's process is on this host and currently stopped (from
  /// /proc; unreadable counts as kPresent). Throws kInvalid for a rank that was never used.
  Condition condition(int rank) const;

  /// Calls back once for each other worker that joined after this one, replacements included, on the
  /// membership thread with no lock held. Per rank, the end of incarnation n precedes the join of n+1.
  /// Earlier events of the latest holder of each rank are delivered first; watch() keeps their order.
  /// Callbacks must be short: they delay all other events.
  void on_join(JoinCallback callback);
  /// Calls back once for each worker that dies (its process ended, its connection broke without leave(), or
  /// its host fell silent), including earlier deaths unless the rank was taken again. If rank 0 dies, or
  /// reports that it considers this worker dead, the store is lost and rank 0's death is the last event. No
  /// callback starts after leave() or the destructor returned.
  void on_death(DeathCallback callback);
  /// Calls back once for each other worker that left by leave(), including earlier ones.
  void on_departure(DepartureCallback callback);
  /// Combines on_join(), on_death() and on_departure(); events are delivered in the order they happened.
  void watch(Callbacks callbacks);

  /// Waits until each of `ranks` (empty: all, in a fixed world) has called it with the same tag and ranks.
  /// The nth calls match; counting restarts when one of the ranks has a new holder. Throws on all callers:
  /// kTimedOut naming missing ranks; kDisconnected naming one that died, left or was replaced meanwhile
  /// (then call again). The earliest deadline applies to all.
  void barrier(const std::string& tag, std::vector<int> ranks, Deadline deadline);
  /// Like barrier(), and returns all ranks' bytes (at most 64 KiB each) in rank order.
  std::vector<Bytes> all_gather_bytes(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                      Deadline deadline);
  std::vector<Bytes> all_gather_bytes(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                      Wait wait);
  /// The result of a round: all ranks' bytes in rank order, or the failure.
  using GatherCallback = std::function<void(std::vector<Bytes> all, std::optional<Error> failure)>;
  /// Like all_gather_bytes(), but returns at once, also inside callbacks, and calls `done` exactly once: on the
  /// membership thread, or on the one that ends the membership; in a world of one before it returns. `done` must be
  /// short and must not throw. Throws what all_gather_bytes() throws before it waits; then `done` is not called.
  void all_gather_bytes_async(const std::string& tag, BytesView mine, std::vector<int> ranks,
                              Deadline deadline, GatherCallback done);
  /// The same without a deadline, for a tag with which these ranks gather only once: nothing of it is kept afterwards.
  void all_gather_bytes_once(const std::string& tag, BytesView mine, std::vector<int> ranks,
                             GatherCallback done);

  /// Like barrier(), and returns the sums of all ranks' counts (each rank gives the same number of them) and the
  /// first notes. An empty note is none. The answer's size does not depend on the number of ranks.
  CountSums sum(const std::string& tag, std::vector<std::uint64_t> counts, BytesView note,
                std::vector<int> ranks, const Wait& wait);

  /// A transport that accepts connections of other members, and the address that they dial.
  struct Listening {
    std::unique_ptr<net::Transport> transport;
    std::string address;
  };
  /// Makes a transport for this worker's own connections to other members, separate from those to the store, but
  /// with the same kind of authentication and encryption. It listens at a free port of the address at which
  /// other hosts reach this worker; on loopback if the store does. `use` differs for every transport of a
  /// worker. The transport may outlive this object. Throws kInvalid in a world of one.
  Listening listen(const std::string& use, net::Handler& handler) const;

  /// Leaves, so that other workers see a departure instead of a death. Rank 0 keeps serving until the
  /// others have left or the deadline passes. Idempotent; later barriers throw kCancelled.
  void leave(Deadline deadline);
  /// Leaves without leave(): other workers see a death at once, with this worker's name and `why` ("left
  /// because …"). Waits at most half a second for the store. No effect after leave(); later barriers throw
  /// kCancelled.
  void give_up(const std::string& why);

  class Impl;

 private:
  explicit Membership(std::unique_ptr<Impl> impl);
  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::rendezvous
