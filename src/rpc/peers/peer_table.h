#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/protocol.h>
#include <torchspan/detail/rpc/message.h>

namespace torchspan::rpc {

/// One process of the world: a rank, and how many processes held that rank before it.
struct PeerId {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  friend auto operator<=>(const PeerId&, const PeerId&) = default;
};

/// An operating-system process.
struct ProcessId {
  std::int64_t pid = 0;
  std::uint64_t start_ticks = 0;  ///< detects reused pids
};

/// A member of the world, as its membership reports it.
struct Peer {
  WorkerInfo info;
  std::string address;
  std::uint64_t instance = 0;
  std::uint32_t incarnation = 0;
  ProcessId process = {};
  ProtocolRange wire = kWireProtocol;
  PeerId id() const { return {info.rank, incarnation}; }
};

/// Holds the members of the world that this worker knows, itself included: their names, processes and whether
/// they are present. Thread-safe.
class PeerTable {
 public:
  explicit PeerTable(Peer self) { begin(std::move(self)); }

  /// Adds a worker that joined; it takes its rank from the process before it.
  void add(Peer peer);
  /// Marks a process that died or left. Returns false if that was known, or if another process has the rank
  /// now.
  bool depart(const Peer& peer, const Error& reason);
  /// Forgets that a rank was a member, as an open world does; keeps its name for reports.
  void forget(std::uint32_t rank);
  /// Forgets everything known before, when this worker has joined its world.
  void begin(Peer self);

  /// Whether exactly this process is known, not another one with its rank.
  bool knows(const Peer& peer) const;
  bool is_present(std::uint32_t rank) const;
  std::optional<Peer> find_present(std::uint32_t rank) const;
  /// The same, but throws: Error{kInvalid} if there is no such rank, and the reason of the departure if the
  /// process has departed.
  Peer present(std::uint32_t rank) const;
  std::vector<Peer> all_present() const;

  /// Returns the members by rank; a fixed world keeps those that departed.
  std::vector<WorkerInfo> members() const;
  /// Returns the rank of a destination. If there is none, throws Error{kInvalid} that lists the members.
  std::uint32_t resolve(const Destination& to) const;
  WorkerInfo info(const Destination& of) const;
  /// Returns the version and features of messages to the process that has, or had, the rank. Throws
  /// Error{kUnsupported} that names both if there is no common version.
  Protocol protocol(std::uint32_t rank) const;
  /// Returns the name of the process that has, or had, the rank.
  std::string name(std::uint32_t rank) const;

 private:
  struct Entry {
    Peer peer;
    std::optional<Error> departed;
    bool member = true;
    std::optional<Protocol> protocol;  ///< common to both; the store admits no worker without one
  };
  using Entries = std::map<std::uint32_t, Entry>;
  Entries::const_iterator find(const Destination& of) const TORCHSPAN_REQUIRES(mutex_);
  void release_name(const Entry& entry) TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  Entries entries_ TORCHSPAN_GUARDED_BY(mutex_);
  ProtocolRange wire_ TORCHSPAN_GUARDED_BY(mutex_);                                       ///< of this worker
  std::map<std::string, std::uint32_t, std::less<>> ranks_ TORCHSPAN_GUARDED_BY(mutex_);  ///< of members
};

}  // namespace torchspan::rpc
