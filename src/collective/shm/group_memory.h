#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "collective/shm/bootstrap.h"
#include "collective/shm/peer_memory.h"
#include "collective/shm/signals.h"

namespace torchspan::collective::shm {

/// The shared memory of one group, as mapped by one rank: the control block, in rank 0's arena, and the
/// staging area of every rank, in that rank's arena.
class GroupMemory {
 public:
  /// Collective: `members` are peer memory ranks, by rank of the group; `gather` returns the bytes of all
  /// participants, and `answering` the index of each member among them. Throws the same error on every rank
  /// if one of them has no memory.
  static std::unique_ptr<GroupMemory> make(std::shared_ptr<PeerMemory> peer_memory, std::vector<int> members,
                                           const GatherBytes& gather, const std::vector<int>& answering);
  /// Other ranks may still read this rank's last calls: its memory is released when they no longer can.
  ~GroupMemory();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }
  const std::shared_ptr<PeerMemory>& peer_memory() const { return peer_memory_; }
  const PeerIdentity& peer(int rank) const {
    return peer_memory_->peer(members_[static_cast<std::size_t>(rank)]);
  }
  Signals& signals() { return *signals_; }
  std::uint64_t chunk_bytes() const { return chunk_bytes_; }

  Slot& slot(int rank, std::uint64_t sequence) const { return staging_area(rank).slots[sequence % kSlots]; }
  std::byte* staging(int rank, std::uint64_t chunk) const {
    return staging_area(rank).staging() + chunk % kStagingBuffers * chunk_bytes_;
  }
  /// The address of a contribution in a rank's arena; throws kInvalid for an offset outside its memory.
  std::byte* place(int rank, const Call& call) const;
  /// Unmaps a large contribution of another rank, which this rank has read: only what a rank has itself counts as its
  /// memory. The next access maps it again.
  void unmap(int rank, const Call& call) const;
  /// Waits until no other rank writes to this rank's contributions. They see that it has left, or that the group is broken,
  /// before they begin the next unit.
  void await_units();
  /// The offset of `data` in this rank's arena; nullopt if it is outside.
  std::optional<std::uint64_t> place_of(const void* data, std::size_t bytes) const;

 private:
  GroupMemory() = default;
  /// The offsets that one rank sends to the others.
  struct Places;
  Places reserve(std::size_t staging_area_bytes, std::size_t control_bytes, bool oversubscribed);
  void release_unused();
  void open(const std::vector<Places>& places, std::size_t staging_area_bytes, std::size_t control_bytes);
  StagingArea& staging_area(int rank) const { return *staging_areas_[static_cast<std::size_t>(rank)]; }

  std::shared_ptr<PeerMemory> peer_memory_;
  std::vector<int> members_;
  int rank_ = 0;
  std::uint64_t chunk_bytes_ = 0;
  std::optional<Arena::Stretch> own_staging_area_;
  std::optional<Arena::Stretch> own_control_;  ///< on rank 0 only
  std::vector<StagingArea*> staging_areas_;
  std::vector<std::uint64_t> tokens_;  ///< of each rank's staging area while the rank is in the group
  std::optional<Signals> signals_;
};

}  // namespace torchspan::collective::shm
