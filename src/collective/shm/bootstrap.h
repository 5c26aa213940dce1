#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/shm/local_ranks.h"
#include "collective/shm/peer_memory.h"

namespace torchspan::collective::shm {

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
                          LocalRanks local_ranks, const Gather& gather);

}  // namespace torchspan::collective::shm
