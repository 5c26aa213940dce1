#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "collective/shm/peer_memory.h"
#include "collective/shm/unix_sockets.h"

namespace torchspan::collective::shm {

/// Returns the bytes of every rank, indexed by rank of the new group, over a channel that its members already
/// have. Throws if a rank cannot answer.
using Gather = std::function<std::vector<Bytes>(BytesView mine)>;

inline constexpr std::size_t kTokenBytes = 32;

struct NeighborsPlan {
  std::vector<PeerIdentity> peers;  ///< by rank of the group to be
  std::vector<std::string> hosts;   ///< the hosts that they report, by rank
  int self = 0;
  std::string folder = {};   ///< for a socket that processes of other network namespaces can find
  std::string refusal = {};  ///< why this rank shares no memory, even if it reaches others
};

/// Finds which ranks reach each other by Unix sockets. Reporting the same host and kernel is not sufficient,
/// because containers and pods have separate network namespaces.
struct Neighbors {
  std::vector<int> leaders;  ///< by rank: the first rank of its host
  std::vector<std::string>
      reasons;  ///< by rank: why it does not share memory with an earlier rank of the same machine
  bool one_network = false;        ///< all ranks are in the network namespace of the first
  std::vector<Bytes> tokens = {};  ///< by rank: the token that its callers need
  std::optional<UnixListener> listener = {};
  std::optional<UnixConnection> connection = {};  ///< to the leader, if that is another rank

  bool all_together() const;
};

/// Collective: every rank listens, and connects to the earlier ranks of its machine until one answers that
/// runs as the same user.
Neighbors find_neighbors(Executor& executor, const NeighborsPlan& plan, const Gather& gather);

}  // namespace torchspan::collective::shm
