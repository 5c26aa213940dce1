#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "collective/shm/peer_memory.h"
#include "collective/shm/unix_sockets.h"

namespace torchspan::collective::shm {

/// Everybody's bytes, by rank of the group to be: the channel over which its members know each other already.
/// Throws what keeps somebody from answering.
using Gather = std::function<std::vector<Bytes>(BytesView mine)>;

inline constexpr std::size_t kTokenBytes = 32;

struct NeighborsPlan {
  std::vector<PeerIdentity> peers;  ///< by rank of the group to be
  std::vector<std::string> hosts;   ///< where they say they are, by rank
  int self = 0;
  std::string folder = {};   ///< where a socket may lie that processes of other network namespaces find
  std::string refusal = {};  ///< why this rank has no neighbors whatever it reaches
};

/// Which ranks reach each other by Unix sockets: that they say to be on one host, and share its kernel, is
/// not enough, since containers and pods have network namespaces of their own.
struct Neighbors {
  std::vector<int> leaders;  ///< by rank: the first rank of its host
  std::vector<std::string>
      reasons;                     ///< by rank: why it is no neighbor of an earlier rank of the same machine
  bool one_network = false;        ///< all ranks are in the network namespace of the first
  std::vector<Bytes> tokens = {};  ///< by rank: what its callers have to know
  std::optional<UnixListener> listener = {};
  std::optional<UnixConnection> connection = {};  ///< to the leader, where that is another rank

  bool all_together() const;
};

/// Collective: every rank listens, and dials the earlier ranks of its machine until one answers that runs as
/// the same user.
Neighbors find_neighbors(Executor& executor, const NeighborsPlan& plan, const Gather& gather);

}  // namespace torchspan::collective::shm
