#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/net/tls.h>

namespace torchspan::rendezvous {

/// One worker of the world, as it described itself when it joined.
struct Member {
  std::string name;
  int rank = 0;
  std::string address;         ///< where its own transport listens: what peers dial
  std::uint64_t instance = 0;  ///< random per start of the process: a restarted worker is another one
  std::string host;            ///< host name, for people
  std::string host_id;  ///< equal only on the same boot of the same machine; still no proof of nearness
  std::int64_t pid = 0;
  std::uint64_t start_ticks =
      0;  ///< when the process started, in the kernel's ticks: tells re-used pids apart
  std::int64_t uid = 0;
  std::uint64_t functions_digest = 0;
  std::uint32_t incarnation = 0;  ///< of this rank, from the store: the nth that took its predecessor's place
};

/// What can be said about a member: see Membership::condition().
enum class Condition : std::uint8_t {
  kPresent,
  kStopped,  ///< its process is stopped by a signal or a debugger: it is silent, but not dead
  kDead,
  kLeft,
};

/// As MembershipOptions::rank in an open world: the store gives the lowest rank that was never used.
inline constexpr int kAnyRank = -1;
/// As MembershipOptions::world_size: workers come and go while the world lives.
inline constexpr int kOpenWorld = 0;

/// "worker1 (rank 1, pid 4711 on node3)": how messages name a worker.
std::string describe(const Member& member);

/// Makes the transport of one endpoint ("store", or "<worker>.membership") for `handler`.
using TransportFactory =
    std::function<std::unique_ptr<net::Transport>(const std::string& endpoint, net::Handler& handler)>;

/// Socket transports of one host, with small limits, that prove `secret`.
TransportFactory stream_transports(Executor& executor, net::Secret secret);
/// The same between hosts, over TLS.
TransportFactory tls_transports(Executor& executor, net::Secret secret, net::TlsOptions tls = {});

struct MembershipOptions {
  std::string name;    ///< 1 to 127 of A-Z a-z 0-9 _ . : -
  int rank = 0;        ///< kAnyRank: see there
  int world_size = 1;  ///< kOpenWorld: see there
  /// Where workers find the store: "tcp:127.0.0.1:29500", "tls:node0:29500", "unix:/path", "sim:store".
  std::string store_address;
  std::string store_listen;    ///< where rank 0 serves it, if that is another address; else empty
  std::string address;         ///< this worker's own listening address, told to everybody
  std::string job;             ///< a store of another job refuses us without harm to its own world
  std::uint64_t instance = 0;  ///< 0: drawn from the system's random source
  std::uint64_t functions_digest = 0;
  std::vector<std::string> functions;  ///< "name(signature)" behind the digest, so that a difference is named
  bool require_same_functions = true;
  Duration timeout = std::chrono::seconds(60);
  /// How often the store asks workers of other hosts for a sign of life, and how long it waits for one. Rank
  /// 0's values hold for all. On rank 0's own host nobody is asked: there the end of a connection tells.
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration dead_after = std::chrono::seconds(5);  ///< at least two heartbeats
  std::string host_id;                            ///< empty: this boot of this machine
};

/// Membership of a world: rank 0 serves a small store, everybody (rank 0 too) is its client over a connection
/// that proves the cluster secret and whose end is the sign of death; so is a silence of `dead_after` between
/// hosts. Threads: one for the client, one more on rank 0, both idle without traffic on one host. All methods
/// are for any thread except inside callbacks, where the blocking ones (barrier, all_gather, leave) are
/// refused with kInvalid. A fixed world of one opens no connection.
class Membership {
 public:
  using JoinCallback = std::function<void(const Member& member)>;
  using DeathCallback = std::function<void(const Member& member, const Error& reason)>;
  using DepartureCallback = std::function<void(const Member& member)>;
  /// What watch() calls; empty ones are skipped.
  struct Callbacks {
    JoinCallback joined = {};
    DeathCallback died = {};
    DepartureCallback left = {};
  };

  /// How long a round is waited for, and what is told meanwhile.
  struct Wait {
    Deadline until;
    Duration every = Duration::zero();  ///< zero: nothing is told
    /// On the waiting thread, about every `every`: who has not come, by rank. An exception ends the wait.
    std::function<void(const std::vector<Member>& missing)> tell = {};
  };

  /// Meets the others.
  /// Fixed world: returns when all `world_size` workers are in, or throws, on every worker that came:
  /// kTimedOut naming who is missing and who is there; kInvalid for two workers with one name or rank, a
  /// world size or function table that differs (naming both sides), a bad name, a port in use; kDenied for
  /// another secret; kDisconnected when a worker died meanwhile. Workers may start in any order. Once it is
  /// complete, a worker with the rank and name of one that died or left takes its place.
  /// Open world: rank 0 is in at once and must stay; others are let in as they come, or wait for rank 0 until
  /// `timeout` (kTimedOut). A name or rank that a present member holds is refused (kInvalid, naming it). The
  /// name of a member that died or left brings its rank; its rank may also be taken under a new name.
  /// Whoever is refused by a world that runs, or by one of the other sort, does it no harm.
  static std::unique_ptr<Membership> join(Runtime& runtime, TransportFactory transports,
                                          MembershipOptions options);

  /// Without leave() the others hear of our death. Ends the threads within a second.
  ~Membership();
  Membership(const Membership&) = delete;

  /// This worker, with the rank and incarnation that the store gave it.
  const Member& self() const;
  bool open() const;
  /// The latest holder of every rank ever used, by ascending rank, as of now; gone ones included. A fixed
  /// world has all its ranks, an open one only those that were used.
  std::vector<Member> members() const;
  /// How many members() has.
  int world_size() const;
  /// Throws kInvalid with the names that exist.
  Member member(std::string_view name) const;
  /// Throws kInvalid with the ranks that exist.
  Member member(int rank) const;
  /// Whether the latest holder of `rank` neither died nor left, as far as this worker has heard; false for a
  /// rank that an open world has not used yet. Throws kInvalid for a rank that cannot be.
  bool is_present(int rank) const;
  /// As is_present(), and kStopped when the member's process is on this host and stopped right now (read from
  /// /proc; what cannot be read counts as kPresent). Throws kInvalid for a rank that nobody ever held.
  Condition condition(int rank) const;

  /// Calls back once for each other worker that joined after this one, those that came back included; from
  /// the membership thread, holding no lock. Ordered with deaths and departures: the end of incarnation n
  /// of a rank, then the coming of n+1. What happened before this call is told first, callback by callback;
  /// watch() keeps the order there too. Callbacks must be short: nothing else is heard meanwhile.
  void on_join(JoinCallback callback);
  /// Calls back once for each worker that dies (its process ended, its connection broke without leave(), or
  /// its host fell silent), earlier deaths included, also those before our coming unless somebody took the
  /// place. When rank 0 dies, or tells us that it holds us for dead, the store is lost: rank 0's death is the
  /// last one heard. No callback starts after leave() or destruction returned.
  void on_death(DeathCallback callback);
  /// Calls back once for each other worker that left by leave(), earlier ones included.
  void on_departure(DepartureCallback callback);
  /// on_join(), on_death() and on_departure() in one: all is told in the order in which it happened.
  void watch(Callbacks callbacks);

  /// Waits until each of `ranks` (empty: everybody, in a fixed world) called it with this tag and these
  /// ranks; the nth call meets the others' nth, counted anew when one of the ranks has a new holder. Throws,
  /// for all who came: kTimedOut naming the missing; kDisconnected naming who died or left, or whose place
  /// was taken meanwhile (then call again). The first deadline to end decides for all.
  void barrier(const std::string& tag, std::vector<int> ranks, Deadline deadline);
  /// As barrier(), and returns everybody's bytes (64 KiB each at most), in the order of ascending rank.
  std::vector<Bytes> all_gather_bytes(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                      Deadline deadline);
  std::vector<Bytes> all_gather_bytes(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                      Wait wait);

  /// Says good-bye, so that the others hear a departure and not a death. Rank 0 goes on serving the others
  /// until they left or the deadline ends. Idempotent; afterwards barriers throw kCancelled.
  void leave(Deadline deadline);
  /// Ends our part without a good-bye: the others hear of a death at once, whose story is this worker's name
  /// and `why` ("left because …"). Waits half a second at most for the store to know it. Nothing after
  /// leave(); afterwards barriers throw kCancelled.
  void give_up(const std::string& why);

  class Impl;

 private:
  explicit Membership(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::rendezvous
