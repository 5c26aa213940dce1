#pragma once
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include "rpc/peers/peer_table.h"

namespace torchspan::rpc {

/// Records which processes are in the world, for the reference protocol. It is part of the protocol's state
/// machine, so it changes between two events and never during one.
class Presence {
 public:
  enum class Standing {
    kPresent,
    kUnknown,   ///< its join has not been reported yet
    kDeparted,  ///< it died or left, or another process has its rank
  };

  /// Forgets all processes except this worker.
  void begin(PeerId self) { latest_ = {{self.rank, Latest{self.incarnation, true}}}; }
  /// Adds a process. Returns the process that had its rank, if that one's end had not been reported.
  std::optional<PeerId> join(PeerId peer) {
    auto [it, fresh] = latest_.try_emplace(peer.rank, Latest{peer.incarnation, true});
    if (fresh || it->second.incarnation > peer.incarnation) return std::nullopt;
    const Latest before = std::exchange(it->second, Latest{peer.incarnation, true});
    if (!before.present || before.incarnation == peer.incarnation) return std::nullopt;
    return PeerId{peer.rank, before.incarnation};
  }
  /// Marks a process as gone. Returns false if that was known.
  bool depart(PeerId peer) {
    auto [it, fresh] = latest_.try_emplace(peer.rank, Latest{peer.incarnation, false});
    if (fresh) return true;
    if (it->second.incarnation > peer.incarnation) return false;
    const Latest before = std::exchange(it->second, Latest{peer.incarnation, false});
    return before.present || before.incarnation != peer.incarnation;
  }
  Standing of(PeerId peer) const {
    const auto it = latest_.find(peer.rank);
    if (it == latest_.end() || it->second.incarnation < peer.incarnation) return Standing::kUnknown;
    const bool it_is = it->second.incarnation == peer.incarnation && it->second.present;
    return it_is ? Standing::kPresent : Standing::kDeparted;
  }
  bool present(PeerId peer) const { return of(peer) == Standing::kPresent; }
  /// Returns the latest process of a rank, gone or not.
  PeerId latest(std::uint32_t rank) const {
    const auto it = latest_.find(rank);
    return {rank, it == latest_.end() ? 0 : it->second.incarnation};
  }

 private:
  struct Latest {
    std::uint32_t incarnation = 0;
    bool present = false;
  };
  std::unordered_map<std::uint32_t, Latest> latest_;
};

}  // namespace torchspan::rpc
