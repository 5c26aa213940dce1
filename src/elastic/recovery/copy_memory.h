#pragma once
#include <utility>

#include "elastic/recovery/copy_inventory.h"
#include "elastic/recovery/state_part.h"

namespace torchspan::elastic {

/// The copies in the memory of one rank: of its own state and of that of the rank before it. Of each it has the newest
/// one that all ranks have, and the next one until all ranks have it. Outlives the objects that were copied.
class CopyMemory {
 public:
  StatePart next_own;   ///< exists() once it is copied
  StatePart next_held;  ///< exists() once all of it has arrived

  /// All ranks have the next copies: they replace the older ones, whose memory is used again.
  void commit() {
    replace(own_, next_own);
    replace(held_, next_held);
  }
  /// Keeps the copies of this id only; they count as those that all ranks have.
  void keep(const CopyId& id) {
    keep_in(own_, next_own, id);
    keep_in(held_, next_held, id);
  }
  /// This rank's own state came back from the rank that held it.
  void put_own(StatePart part) { own_ = std::move(part); }
  /// Null if this rank does not have it.
  const StatePart* own(const CopyId& id) const { return find(own_, next_own, id); }
  const StatePart* held(const CopyId& id) const { return find(held_, next_held, id); }
  CopyInventory inventory() const {
    CopyInventory all;
    for (const StatePart* part : {&own_, &next_own})
      if (part->exists()) all.own.push_back(part->id);
    for (const StatePart* part : {&held_, &next_held})
      if (part->exists()) all.held.push_back(part->id);
    return all;
  }

 private:
  static void replace(StatePart& older, StatePart& newer) {
    std::swap(older, newer);
    newer.forget();
  }
  static void keep_in(StatePart& part, StatePart& next, const CopyId& id) {
    if (next.exists() && next.id == id) std::swap(part, next);
    next.forget();
    if (part.exists() && part.id != id) part.forget();
  }
  static const StatePart* find(const StatePart& part, const StatePart& next, const CopyId& id) {
    if (part.exists() && part.id == id) return &part;
    return next.exists() && next.id == id ? &next : nullptr;
  }

  StatePart own_, held_;
};

}  // namespace torchspan::elastic
