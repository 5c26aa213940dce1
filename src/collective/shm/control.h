#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/api/step_part.h"

/// The layout of a group's shared memory, which all its ranks map. Although only peers of one job write to it,
/// every offset and length that is read from it is checked against the mapping before use.
namespace torchspan::collective::shm {

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kMostDimensions = 10;
inline constexpr std::size_t kMostBreakageText = 2048;

/// Counts that only their rank writes and that only grow.
enum class Count : std::uint8_t {
  kPosted,    ///< calls whose Call is in its slot
  kFinished,  ///< calls whose slot and memory this rank no longer reads
  kStaged,    ///< chunks written to the rank's staging buffers
  kReduced,   ///< chunks of which the rank's slice is reduced
  kTaken,     ///< chunks of which the rank has copied its part
  kUnits,     ///< of the whole group: units of shared tensors that are reduced
};
inline constexpr std::size_t kRankCounts = 5;

struct alignas(kLine) RankCounts {
  std::array<std::atomic<std::uint64_t>, kRankCounts> of{};
  std::atomic<std::uint64_t> units_claimed{0};  ///< of the rank's own region, by any rank
  std::atomic<std::uint32_t> in_unit{0};        ///< the rank is writing to the tensors of all ranks
  std::atomic<std::uint32_t> left{0};           ///< the rank has left the group
};

/// The futex on which a rank sleeps, and the count that it waits for.
struct alignas(kLine) WaitWord {
  std::atomic<std::uint32_t> futex_word{0};  ///< the futex
  std::atomic<std::uint32_t> asleep{0};
  std::atomic<std::uint64_t> target{0};
  std::atomic<Count> count{Count::kPosted};
};

struct RankControl {
  RankCounts counts;
  WaitWord wait_word;
};

/// Why the group is broken; written once, by the first rank that detects it.
struct Breakage {
  std::atomic<std::uint32_t> state{0};  ///< 0: intact, 1: being written, 2: written
  std::uint32_t kind = 0;
  std::uint32_t text_size = 0;
  std::array<char, kMostBreakageText> text{};
};

struct Control {
  alignas(kLine) std::uint32_t ranks = 0;
  std::uint32_t oversubscribed = 0;  ///< more ranks than cores
  std::uint64_t chunk_bytes = 0;
  std::atomic<std::uint32_t> leavers{0};  ///< how many ranks have left the group
  alignas(kLine) std::atomic<std::uint64_t> units_done{0};
  alignas(kLine) Breakage breakage;
  /// Followed by `ranks` RankControls.
  RankControl* ranks_control() { return reinterpret_cast<RankControl*>(this + 1); }
  static std::size_t bytes_for(std::size_t ranks) { return sizeof(Control) + ranks * sizeof(RankControl); }
};
static_assert(sizeof(Control) % kLine == 0 && sizeof(RankControl) % kLine == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

enum class Verb : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kExchange,
  kBarrier,
  kGather,   ///< like kAllToAll, with a root
  kScatter,  ///< the same
  kReduce,   ///< kAllReduce to a root
};

/// The call of one rank. Equal on all ranks, except for `place` and what the verb allows to differ.
struct Call {
  std::uint64_t sequence = 0;
  Verb verb = Verb::kBarrier;
  std::int8_t dtype = 0;
  std::uint8_t reduction = 0;
  std::uint8_t sparse = 0;
  std::int32_t root = -1;
  std::uint32_t dimensions = 0;
  std::uint32_t sparse_dimensions = 0;
  std::uint32_t tensors = 0;  ///< of a coalesced operation; else 0
  std::uint32_t shapes = 0;   ///< hash of their shapes
  std::array<std::int64_t, kMostDimensions> sizes{};
  std::uint64_t bytes = 0;    ///< size of the contribution
  std::uint64_t note = 0;     ///< size of the shapes, which precede the contribution in the slot
  std::uint64_t place = 0;    ///< offset in the rank's arena, if `shared`
  std::uint64_t entries = 0;  ///< of a sparse tensor
  std::uint8_t shared = 0;    ///< the contribution is in the rank's arena
  std::uint8_t in_slot = 0;   ///< it is in the slot
  StepPart part = {};         ///< to which the call belongs; none in the calls of 0.1.0, which end before it
};
static_assert(std::is_trivially_copyable_v<Call> && sizeof(Call) <= 3 * kLine);  // as in 0.1.0

inline constexpr std::size_t kSlots = 8;
inline constexpr std::size_t kSlotBytes = std::size_t{32} << 10;
inline constexpr std::size_t kStagingBuffers = 3;

/// A call, with its contribution if that is small enough.
struct Slot {
  alignas(kLine) Call call;
  alignas(kLine) std::array<std::byte, kSlotBytes> bytes;
};

/// A rank's part of the group's memory, in its arena: slots, then staging buffers of chunk_bytes each.
struct StagingArea {
  /// The group's token while the rank may read the other ranks' staging areas; another value afterwards.
  alignas(kLine) std::atomic<std::uint64_t> member_of{0};
  std::array<Slot, kSlots> slots;
  std::byte* staging() { return reinterpret_cast<std::byte*>(this + 1); }
  static std::size_t bytes_for(std::uint64_t chunk_bytes) {
    return sizeof(StagingArea) + kStagingBuffers * chunk_bytes;
  }
};

}  // namespace torchspan::collective::shm
