#pragma once
#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan::elastic {

/// Identifies the copies that all ranks made after one step: `round` differs between attempts to train, because two of
/// them may reach a step with different states.
struct CopyId {
  std::int64_t step = 0;
  std::uint64_t round = 0;
  friend auto operator<=>(const CopyId&, const CopyId&) = default;
};

/// What a rank has in memory when the ranks synchronize after a death.
struct CopyInventory {
  std::vector<CopyId> own;              ///< copies of its own state
  std::vector<CopyId> held;             ///< copies of the state of the rank before it
  std::int64_t newest_checkpoint = -1;  ///< step of the newest checkpoint that this rank found; -1: none
  std::uint64_t round = 0;              ///< counts the attempts of this rank's process to train

  Bytes encode() const;
  /// Throws Error{kInvalid} for malformed bytes.
  static CopyInventory decode(BytesView bytes);
};

/// The newest copies that are complete: for each rank, it has its own copy or the rank after it (0 after the last one)
/// holds it. Nullopt if there are none. The same on all ranks, because all know the inventories of all.
std::optional<CopyId> newest_complete(const std::vector<CopyInventory>& ranks);

}  // namespace torchspan::elastic
