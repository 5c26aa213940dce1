#pragma once
#include <functional>
#include <vector>

#include "collective/kernels.h"
#include "collective/shm/group_memory.h"
#include "collective/shm/operation.h"

namespace torchspan::collective::shm {

/// What this rank needs of another rank's contribution: the bytes starting at `from`, as many as `into`
/// holds.
struct FetchRange {
  std::uint64_t from = 0;
  std::vector<Piece> into = {};
};

/// A dense tensor to be reduced: `bytes` bytes at `data`, elements of `item` bytes.
struct Dense {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t item = 1;
  Kernel kernel = nullptr;
};

/// Moves bytes between the ranks' memories, chunk by chunk. One thread at a time uses it, for one operation
/// after the other in the same order on all ranks; therefore its counts of chunks and units mean the same on
/// all of them.
class ShmAlgorithms {
 public:
  explicit ShmAlgorithms(GroupMemory& memory) : memory_(memory), signals_(memory.signals()) {}

  /// Copies of all ranks' calls of the current operation.
  std::vector<Call>& calls() { return calls_; }

  /// Reduces `work` in place, or this rank's part of it into `into` unless that is null.
  OpCoroutine reduce(const Dense& work, std::byte* into);
  /// Copies what is needed from each rank; `pieces` are this rank's own contribution.
  OpCoroutine fetch(std::vector<FetchRange> wants, std::vector<Piece> pieces);
  /// The bytes in a rank's slot after its note.
  const std::byte* in_slot(int rank) const;
  BytesView note(int rank) const;

 private:
  /// Writes this rank's bytes of a round to its staging buffer; reads what it needs from those of all ranks.
  using Fill = std::function<void(std::size_t round, std::byte* staging)>;
  using Take = std::function<void(std::size_t round, std::uint64_t chunk)>;

  int size() const { return memory_.size(); }
  int rank() const { return memory_.rank(); }
  bool all_shared() const;
  bool all_in_slots() const;
  Reach reach(Count count, std::uint64_t target) const { return {signals_, {count, target}}; }
  /// When a staging buffer may be written again.
  Reach free_for(std::uint64_t chunk) const {
    return reach(Count::kTaken, chunk < kStagingBuffers ? 0 : chunk + 1 - kStagingBuffers);
  }

  /// The units of one shared tensor, split into a region for each rank.
  struct Regions {
    struct Region {
      std::uint64_t first_unit;  ///< of the tensor
      std::uint64_t begin, end;  ///< counted over all tensors that used this region
    };
    std::vector<Region> of;
    std::uint64_t all_done = 0;
  };
  Regions add_regions(std::uint64_t units);
  void reduce_slots(const Dense& work, std::byte* into);
  OpCoroutine reduce_shared(Dense work);
  OpCoroutine scatter_shared(Dense work, std::byte* into);
  OpCoroutine reduce_private(Dense work);
  OpCoroutine scatter_private(const Dense& work, std::byte* into);
  OpCoroutine rounds(std::size_t count, Fill fill, Take take, bool until_all_took);

  GroupMemory& memory_;
  Signals& signals_;
  std::vector<Call> calls_;
  std::uint64_t chunks_ = 0;  ///< of all operations so far
  std::uint64_t units_ = 0;
  std::vector<std::uint64_t> units_by_region_;
};

}  // namespace torchspan::collective::shm
