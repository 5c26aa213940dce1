#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// What a foreign engine must implement to become a backend; SerialBackend does the rest. All calls block,
/// come from one thread, in the same order on all ranks, with contiguous CPU tensors unless the engine
/// accepts others. They may throw anything: an Error passes unchanged, anything else becomes kDisconnected.
class BlockingCollectives {
 public:
  virtual ~BlockingCollectives() = default;
  virtual std::string name() const = 0;
  /// Reduces in place; only called if reduces() returned true, and never with kAvg.
  virtual void all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual bool reduces(at::ScalarType dtype, ReduceOp reduction) const = 0;
  virtual void broadcast(at::Tensor tensor, int root) = 0;
  /// Gathers one row per rank: `all` has the shape [ranks, size of mine]. Both are bytes.
  virtual void all_gather(at::Tensor mine, at::Tensor all) = 0;
  /// Exchanges bytes, split by the counts of each rank.
  virtual void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                          const std::vector<std::int64_t>& all_counts) = 0;
  /// Collective over all ranks: returns the engine of the ranks in `members`, which include this one; null
  /// for one rank alone.
  virtual std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) = 0;
  /// Callable from any thread: fails pending calls and all later ones, as far as the engine can. Ranks that
  /// can still be reached get `cause`.
  virtual void abort(const Error& cause) { static_cast<void>(cause); }
  /// The same when only this rank leaves the world: the others may still finish what this rank has done.
  virtual void end(const Error& reason) { abort(reason); }
};

}  // namespace torchspan::collective
