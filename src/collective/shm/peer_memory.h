#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/shm/arena.h"
#include "collective/world_link.h"

namespace torchspan::collective::shm {

/// A rank of the world, with its name for messages.
struct PeerIdentity {
  int world_rank = 0;
  std::uint64_t instance = 0;  ///< of its process; another process may hold the rank later
  std::string text = {};       ///< "worker1 (rank 1, pid 4711 on node3)"
};

class OpQueue;

/// The memory of a set of ranks on one host, and which of them are gone. bootstrap() makes it; a group and
/// all groups split from it share it. Thread-safe.
class PeerMemory final : public WorldListener {
 public:
  /// `peers` is indexed by peer memory rank; `self` is this process's.
  PeerMemory(std::shared_ptr<WorldLink> world, std::vector<PeerIdentity> peers, int self,
             std::shared_ptr<Arena> own)
      : world_(std::move(world)), peers_(std::move(peers)), self_(self), own_(std::move(own)) {
    mappings_.resize(peers_.size());
    ends_.resize(peers_.size());
    departed_.resize(peers_.size());
  }

  const std::shared_ptr<Runtime>& runtime() const { return world_->runtime(); }
  int self() const { return self_; }
  int size() const { return static_cast<int>(peers_.size()); }
  const PeerIdentity& peer(int peer_rank) const { return peers_[static_cast<std::size_t>(peer_rank)]; }
  const std::shared_ptr<Arena>& own() const { return own_; }
  const SharedMemory& memory(int peer_rank) const {
    return peer_rank == self_ ? own_->mapping() : mappings_[static_cast<std::size_t>(peer_rank)];
  }

  /// Adds a peer's memory, and the socket that closes when the peer ends. Call them before other threads use
  /// this object.
  void add_peer(int peer_rank, SharedMemory memory) {
    mappings_[static_cast<std::size_t>(peer_rank)] = std::move(memory);
  }
  void add_end(int peer_rank, Descriptor socket) {
    ends_[static_cast<std::size_t>(peer_rank)] = std::move(socket);
  }

  void member_died(const rendezvous::Member& member, const Error& reason) override {
    note_departed(member.instance, reason.message());
  }
  void member_left(const rendezvous::Member& member) override {
    note_departed(member.instance, "it left the world");
  }
  void world_ended(const Error& reason) override;
  void world_closing() override;
  /// Checks a rank's connection. Returns why the rank is gone; nullopt if it is not known to be.
  std::optional<std::string> departed(int peer_rank);
  /// The first of these peer ranks that is gone, by its place; see WorldLink::await_first_departed().
  std::optional<WorldLink::DepartedRank> await_first_departed(const std::vector<int>& peer_ranks) const;
  /// Takes over a range of this process's arena that a destroyed group used. Releases it when `unseen`
  /// returns true: no other process reads it. Calls `unseen` from time to time.
  void retire(const Arena::Stretch& stretch, std::function<bool()> unseen);
  void reclaim();

  /// Notifies `listener` while it lives.
  void add(const std::weak_ptr<OpQueue>& listener);

 private:
  struct Retired {
    Arena::Stretch stretch;
    std::function<bool()> unseen;
  };
  void note_departed(std::uint64_t instance, const std::string& how);
  std::vector<std::shared_ptr<OpQueue>> listeners();

  const std::shared_ptr<WorldLink> world_;
  const std::vector<PeerIdentity> peers_;
  const int self_;
  const std::shared_ptr<Arena> own_;
  std::vector<SharedMemory> mappings_;
  std::vector<Descriptor> ends_;
  Mutex mutex_;
  std::vector<std::optional<std::string>> departed_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<OpQueue>> listeners_ TORCHSPAN_GUARDED_BY(mutex_);
  Mutex retired_mutex_;
  std::vector<Retired> retired_ TORCHSPAN_GUARDED_BY(retired_mutex_);
};

}  // namespace torchspan::collective::shm
