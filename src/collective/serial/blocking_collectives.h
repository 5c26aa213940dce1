#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// The minimum that another engine must implement to become a backend; SerialBackend does the rest. All calls
/// block, come from one thread, in the same order on all ranks, and have contiguous CPU tensors unless the
/// engine allows others. Exceptions other than Error count as a lost connection.
class BlockingCollectives {
 public:
  virtual ~BlockingCollectives() = default;
  virtual std::string name() const = 0;
  /// In place; called only if reduces() is true, and never with kAvg.
  virtual void all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual bool reduces(at::ScalarType dtype, ReduceOp reduction) const = 0;
  virtual void broadcast(at::Tensor tensor, int root) = 0;
  /// `mine` is bytes; `all` has one row of bytes per rank, each of mine's size.
  virtual void all_gather(at::Tensor mine, at::Tensor all) = 0;
  /// Bytes; the counts give the number of bytes for and from each rank.
  virtual void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                          const std::vector<std::int64_t>& all_counts) = 0;
  /// Collective over all ranks: makes the collectives of the ranks in `members`, which include this one; null
  /// for a single rank.
  virtual std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) = 0;
  /// On any thread: fails blocked calls and all later ones, as far as the engine can, and sends `cause` to
  /// the ranks that it can reach.
  virtual void abort(const Error& cause) { static_cast<void>(cause); }
  /// As abort(), because this rank leaves the world: other ranks may still complete operations that it has
  /// finished.
  virtual void end(const Error& reason) { abort(reason); }
};

}  // namespace torchspan::collective
