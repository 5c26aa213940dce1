#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/shm/neighbors.h"
#include "collective/shm/peer_memory.h"

namespace torchspan::collective::shm {

struct BootstrapOptions {
  std::vector<PeerIdentity> peers;  ///< by rank of the group to be
  int self = 0;
  std::shared_ptr<Arena> memory;  ///< what this rank hands out
  Deadline deadline;
};

/// What came of a meeting.
struct BootstrapResult {
  std::vector<int> leaders;          ///< by rank: the first of those that it shares memory with
  std::vector<std::string> reasons;  ///< by rank: what kept it from sharing memory, if anything did
  std::shared_ptr<PeerMemory> peer_memory = {};  ///< of this rank's host; null where it is alone
};

/// Collective: neighbors pass each other their memory. All dial their leader, which passes everybody's on;
/// callers prove that they know a random token that only `gather` told. Each keeps its connection with the
/// leader, as a sign of life. Who cannot pass or map memory shares none, nor do those that it was to share
/// with: they are as if on hosts of their own.
BootstrapResult bootstrap(const std::shared_ptr<WorldLink>& world, const BootstrapOptions& plan,
                          Neighbors neighbors, const Gather& gather);

}  // namespace torchspan::collective::shm
