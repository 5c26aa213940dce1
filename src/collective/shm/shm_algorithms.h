#pragma once
#include <functional>
#include <vector>

#include "collective/kernels.h"
#include "collective/shm/group_memory.h"
#include "collective/shm/operation.h"

namespace torchspan::collective::shm {

/// The part of another rank's contribution to copy: the bytes from `from` on, as many as `into` holds.
struct FetchRange {
  std::uint64_t from = 0;
  std::vector<Piece> into = {};
};

/// A dense tensor to reduce: `bytes` bytes at `data`, in elements of `item` bytes.
struct Dense {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t item = 1;
  Kernel kernel = nullptr;
  int root = -1;  ///< the only rank that gets the result; -1: all do
};

/// Moves and reduces bytes between the ranks' memories, chunk by chunk. Used by one thread at a time, for one
/// operation at a time, in the same order on all ranks; therefore counts of chunks and units have the same
/// meaning on all ranks.
class ShmAlgorithms {
 public:
  explicit ShmAlgorithms(GroupMemory& memory) : memory_(memory), signals_(memory.signals()) {}

  /// Copies of all ranks' calls of the current operation.
  std::vector<Call>& calls() { return calls_; }

  /// Reduces `work` in place, unless another rank is its root; if `into` is not null, reduces only this rank's part, into `into`.
  OpCoroutine reduce(const Dense& work, std::byte* into);
  /// Copies a range from each rank; `pieces` are this rank's contribution.
  OpCoroutine fetch(std::vector<FetchRange> wants, std::vector<Piece> pieces);
  /// The contribution in a rank's slot, after its note.
  const std::byte* in_slot(int rank) const;
  BytesView note(int rank) const;

 private:
  /// Fill writes this rank's bytes of a round to its staging buffer; Take reads the buffers of all ranks.
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

  /// The units of one shared tensor, split into one region per rank.
  struct Regions {
    struct Region {
      std::uint64_t first_unit;  ///< of the tensor
      std::uint64_t begin, end;  ///< counted over all tensors of this region
    };
    std::vector<Region> of;
    std::uint64_t all_done = 0;
  };
  Regions add_regions(std::uint64_t units);
  /// Why the shared tensors of this operation may be invalid; nullopt if they are not. A rank frees its tensor when it
  /// leaves the group before it has finished the operation, or when it learns that the group is broken.
  std::optional<Error> why_tensors_lost() const;
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
