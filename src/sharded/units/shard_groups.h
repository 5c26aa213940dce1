#pragma once
#include <optional>
#include <string>
#include <utility>

#include <torchspan/collective/group.h>

namespace torchspan::sharded {

/// The groups of a FullyShardedDataParallel: adjacent ranks divide a copy of the model, and the ranks that have the same
/// part of different copies average its gradients.
class ShardGroups {
 public:
  /// Collective: makes another group of the same ranks. One copy until split().
  explicit ShardGroups(const collective::Group& group);
  /// Why the ranks cannot be divided into parts of `shard_ranks`; empty: they can, or it is 0.
  std::string trouble(int shard_ranks) const;
  /// Collective: makes copies of `shard_ranks` ranks; 0: one copy.
  void split(int shard_ranks);

  const collective::Group& all() const { return all_; }
  /// This rank's copy.
  const collective::Group& copy() const { return copy_; }
  /// The ranks with the same part; nullopt: one copy.
  const std::optional<collective::Group>& replicas() const { return replicas_; }
  void abort(const Error& cause) const;

  /// Sets whether ranks of a copy read each other's parts in place; returns the previous value.
  bool set_in_place(bool in_place) { return std::exchange(in_place_, in_place); }
  /// If they do, collective: returns when no rank reads another one's part any more, so that parts may change.
  void await_readers() const;

 private:
  const collective::Group all_;
  collective::Group copy_;
  std::optional<collective::Group> replicas_;
  bool in_place_ = false;
};

}  // namespace torchspan::sharded
