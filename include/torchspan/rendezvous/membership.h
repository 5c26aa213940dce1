#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/runtime.h>
#include <torchspan/net/transport.h>

namespace torchspan::rendezvous {

/// One worker of the world, as it described itself when it joined.
struct Member {
  std::string name;
  int rank = 0;
  std::string address;      ///< where its own transport listens: what peers dial
  std::uint64_t epoch = 0;  ///< random per start of the process: a restarted worker is another one
  std::string host;         ///< host name, for people
  std::string host_id;      ///< equal only on the same boot of the same machine; still no proof of nearness
  std::int64_t pid = 0;
  std::int64_t uid = 0;
  std::uint64_t functions_digest = 0;
};

/// "worker1 (rank 1, pid 4711 on node3)": how messages name a worker.
std::string describe(const Member& member);

/// Makes the transport of one endpoint ("store", or "<worker>.membership") for `handler`.
using TransportFactory =
    std::function<std::unique_ptr<net::Transport>(const std::string& endpoint, net::Handler& handler)>;

/// Socket transports of one host, with small limits, that prove `secret`.
TransportFactory stream_transports(Executor& executor, net::Secret secret);

struct JoinOptions {
  std::string name;  ///< 1 to 127 of A-Z a-z 0-9 _ . : -
  int rank = 0;
  int world_size = 1;
  std::string store_address;  ///< where rank 0 serves: "tcp:127.0.0.1:29500", "unix:/path", "sim:store"
  std::string address;        ///< this worker's own listening address, told to everybody
  std::string job;            ///< a store of another job refuses us without harm to its own world
  std::uint64_t epoch = 0;    ///< 0: drawn from the system's random source
  std::uint64_t functions_digest = 0;
  std::vector<std::string> functions;  ///< "name(signature)" behind the digest, so that a difference is named
  bool require_same_functions = true;
  Duration timeout = std::chrono::seconds(60);
};

/// Membership of a world: rank 0 serves a small store, everybody (rank 0 too) is its client over a connection
/// that proves the cluster secret and whose end is the sign of death. Threads: one for the client, one more
/// on rank 0, both idle without traffic. All methods are for any thread except inside callbacks, where the
/// blocking ones (barrier, all_gather, leave) are refused with kInvalid. A world of one opens no connection.
class Membership {
 public:
  using DeathCallback = std::function<void(const Member& member, const Error& reason)>;
  using DepartureCallback = std::function<void(const Member& member)>;

  /// Meets the others: returns when all `world_size` workers are in, or throws, on every worker that came:
  /// kTimedOut naming who is missing and who is there; kInvalid for two workers with one name or rank, a
  /// world size or function table that differs (naming both sides), a bad name, a port in use; kDenied for
  /// another secret; kDisconnected when a worker died meanwhile. Workers may start in any order.
  static std::unique_ptr<Membership> join(Runtime& runtime, TransportFactory transports, JoinOptions options);

  /// Without leave() the others hear of our death. Ends the threads within a second.
  ~Membership();
  Membership(const Membership&) = delete;

  const Member& self() const;
  /// All workers of the world by rank, the dead ones included; never changes.
  const std::vector<Member>& members() const;
  int world_size() const { return static_cast<int>(members().size()); }
  /// Throws kInvalid with the names that exist.
  const Member& member(std::string_view name) const;
  /// Throws kInvalid with the ranks that exist.
  const Member& member(int rank) const;
  /// Whether `rank` neither died nor left, as far as this worker has heard.
  bool is_present(int rank) const;

  /// Calls back once for each worker that dies (its process ended, or its connection broke, without leave()),
  /// earlier deaths included; from the membership thread, holding no lock. When rank 0 dies the store dies
  /// with it: its death is the last one heard. No callback starts after leave() or destruction returned.
  void on_death(DeathCallback callback);
  /// Calls back once for each other worker that left by leave(), earlier ones included.
  void on_departure(DepartureCallback callback);

  /// Waits until each of `ranks` (empty: everybody) called it with this tag and these ranks; the nth call
  /// meets the others' nth. Throws, for all who came: kTimedOut naming the missing; kDisconnected naming who
  /// died or left. The first deadline to end decides for all.
  void barrier(const std::string& tag, std::vector<int> ranks, Deadline deadline);
  /// As barrier(), and returns everybody's bytes (64 KiB each at most), in the order of ascending rank.
  std::vector<Bytes> all_gather(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                Deadline deadline);

  /// Says good-bye, so that the others hear a departure and not a death. Rank 0 goes on serving the others
  /// until they left or the deadline ends. Idempotent; afterwards barriers throw kCancelled.
  void leave(Deadline deadline);

  class Impl;

 private:
  explicit Membership(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchspan::rendezvous
