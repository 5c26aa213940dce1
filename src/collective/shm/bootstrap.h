#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "collective/shm/peer_memory.h"
#include "collective/shm/unix_sockets.h"
#include "core/api/agreement.h"

namespace torchspan::collective::shm {

inline constexpr std::size_t kTokenBytes = 32;

struct LocalRanksPlan {
  std::vector<PeerIdentity> peers;  ///< by rank of the new group
  std::vector<std::string> hosts;   ///< the host that each rank reports
  int self = 0;
  std::string folder = {};   ///< for a socket that other network namespaces can reach; may be empty
  std::string refusal = {};  ///< why this rank cannot share memory; empty if it can
};

/// Which ranks reach each other through Unix sockets. One host is not enough for this: containers and pods have
/// separate network namespaces.
struct LocalRanks {
  std::vector<int> leaders;          ///< by rank: the first rank of its host
  std::vector<std::string> reasons;  ///< by rank: why it cannot reach an earlier rank of its machine
  bool one_network = false;          ///< all ranks are in the network namespace of the first
  std::vector<Bytes> tokens = {};    ///< by rank: what peers must send to it
  std::optional<UnixListener> listener = {};
  std::optional<UnixConnection> connection = {};  ///< to the leader, if that is another rank

  bool all_together() const;
};

/// Collective: every rank listens, and connects to the earlier ranks of its machine until one that runs as the
/// same user answers.
LocalRanks find_local_ranks(Executor& executor, const LocalRanksPlan& plan, const GatherBytes& gather);

struct BootstrapOptions {
  std::vector<PeerIdentity> peers;  ///< by rank of the new group
  int self = 0;
  std::shared_ptr<Arena> memory;  ///< the memory that this rank shares
  Deadline deadline;
};

/// The result of bootstrap().
struct BootstrapResult {
  std::vector<int> leaders;                      ///< by rank: the first rank that it shares memory with
  std::vector<std::string> reasons;              ///< by rank: why it shares no memory; empty if it does
  std::shared_ptr<PeerMemory> peer_memory = {};  ///< of this rank's host; null if it is alone there
};

/// Collective: the ranks of a host pass each other their memory. All connect to their leader, which distributes the
/// memory of all, and authenticate with a random token that only `gather` has distributed. The connection to
/// the leader stays open, so that its end reveals the end of a process. If a rank cannot pass or map memory,
/// the ranks of its host share none, as if each were alone on a host.
BootstrapResult bootstrap(const std::shared_ptr<WorldLink>& world, const BootstrapOptions& plan,
                          LocalRanks local_ranks, const GatherBytes& gather);

}  // namespace torchspan::collective::shm
