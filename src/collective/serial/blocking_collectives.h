#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// The little that a foreign engine must know to become a back end (SerialBackend does the rest). All calls
/// block, come from one thread, in the same order on all ranks, and are contiguous CPU tensors unless the
/// engine says otherwise. They throw anything; Error as it is, the rest as a lost connection.
class BlockingCollectives {
 public:
  virtual ~BlockingCollectives() = default;
  virtual std::string name() const = 0;
  /// In place; only called for what reduces() agreed to. kAvg never.
  virtual void all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual bool reduces(at::ScalarType dtype, ReduceOp reduction) const = 0;
  virtual void broadcast(at::Tensor tensor, int root) = 0;
  /// One row for each rank: `all` has the shape [ranks, mine's size]. Both are bytes.
  virtual void all_gather(at::Tensor mine, at::Tensor all) = 0;
  /// Bytes, cut by counts for each rank.
  virtual void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                          const std::vector<std::int64_t>& all_counts) = 0;
  /// Collective over everybody: the collectives of the ranks in `members`, this one among them; null for one
  /// alone.
  virtual std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) = 0;
  /// From any thread: ends what blocks, and all that is called later, as far as the engine can. The ranks
  /// that can be told hear `cause`.
  virtual void abort(const Error& cause) { static_cast<void>(cause); }
  /// The same for this rank, whose part in the world ends: the others may still finish what it has done.
  virtual void end(const Error& reason) { abort(reason); }
};

}  // namespace torchspan::collective
