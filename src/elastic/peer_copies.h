#pragma once
#include <compare>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/executor.h>

#include "elastic/tracked_state.h"

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

/// A copy of one rank's state in two tensors of bytes, in which it is also sent.
struct StatePart {
  CopyId id;
  at::Tensor header;  ///< an encoded StateListing
  at::Tensor data;    ///< the tensors of the listing, each at a multiple of kAlignment

  static constexpr std::int64_t kAlignment = 64;

  bool exists() const { return header.defined(); }
  /// Keeps the memory of `data` for the next copy.
  void forget() { header.reset(); }
  /// Copies the state; reuses the memory of `data` if it fits. Throws Error{kUnsupported} that names an object whose
  /// state is a part of a tensor or on another worker.
  void take(const CopyId& of, const NamedSources& sources);
  /// Makes room for a part that another rank sends.
  void expect(const CopyId& of, std::int64_t header_bytes, std::int64_t data_bytes);
  /// Restores the objects. Throws Error{kInvalid} that names what does not fit.
  void load(const NamedSources& sources) const;
};

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

/// Copies the state of each rank into its own memory and that of the next rank, and restores it from there. One object
/// for each attempt to train, over a group of all ranks. Used by one thread; another one sends.
class PeerCopies {
 public:
  PeerCopies(collective::Group group, CopyMemory& memory, Executor& executor)
      : group_(std::move(group)), memory_(memory), executor_(executor) {}
  /// A copy that is being sent is given up.
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;

  void add(std::string name, checkpoint::SourcePtr source);

  /// Exchanges what the ranks have; returns the newest complete copies. `newest_checkpoint` of rank 0 counts. Collective.
  std::optional<CopyId> exchange(std::int64_t newest_checkpoint, std::uint64_t round);
  /// What rank 0 passed to exchange().
  std::int64_t newest_checkpoint() const { return inventories_.at(0).newest_checkpoint; }
  /// Restores the registered objects from these copies; a rank without its own gets it from the next rank. Throws the
  /// same Error on all ranks if an object does not fit. Collective.
  void load(const CopyId& id);

  /// Copies the state after `step` steps and returns; a thread sends it. Waits for the previous copy first, and throws
  /// its failure. Collective.
  void begin(std::int64_t step);
  /// Waits until all ranks have the last copy; throws its failure.
  void finish();

 private:
  void send_around();
  void fetch_missing(const CopyId& id);
  int next() const { return (group_.rank() + 1) % group_.size(); }
  int previous() const { return (group_.rank() + group_.size() - 1) % group_.size(); }

  const collective::Group group_;
  CopyMemory& memory_;
  Executor& executor_;
  NamedSources sources_;
  std::vector<CopyInventory> inventories_;
  std::exception_ptr failure_;  ///< of the last copy; written by `thread_`
  Thread thread_;
};

}  // namespace torchspan::elastic
