#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/shm/neighbors.h"
#include "collective/shm/peer_memory.h"

namespace torchspan::collective::shm {

struct BootstrapOptions {
  std::vector<PeerIdentity> peers;  ///< by rank of the new group
  int self = 0;
  std::shared_ptr<Arena> memory;  ///< the memory that this rank shares
  Deadline deadline;
};

/// The outcome on one rank.
struct BootstrapResult {
  std::vector<int> leaders;          ///< by rank: the first of the ranks that share memory with it
  std::vector<std::string> reasons;  ///< by rank: why it does not share memory, if it does not
  std::shared_ptr<PeerMemory> peer_memory = {};  ///< of this rank's host; null if no other rank shares it
};

/// Collective: passes the memory of ranks on one host to each other. All connect to their leader, which
/// forwards the memory of all; each proves that it knows a random token from `gather`, and keeps its
/// connection to the leader as a sign of life. A rank that cannot pass or map memory shares none, and neither
/// do its neighbors: each then counts as a separate host.
BootstrapResult bootstrap(const std::shared_ptr<WorldLink>& world, const BootstrapOptions& plan,
                          Neighbors neighbors, const Gather& gather);

}  // namespace torchspan::collective::shm
