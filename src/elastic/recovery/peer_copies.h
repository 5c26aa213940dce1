#pragma once
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/collective/group.h>
#include <torchspan/detail/core/executor.h>

#include "elastic/recovery/copy_memory.h"

namespace torchspan::elastic {

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
  std::optional<CopyId> meet(std::int64_t newest_checkpoint, std::uint64_t round);
  /// What rank 0 passed to meet().
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
  /// Throws the error of the first rank that has one.
  void agree(const std::string& failure) const;
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
