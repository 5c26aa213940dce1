#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/collective.h>

namespace torchspan::collective {

/// How many bytes each rank sends to each other one in all_to_all(), as all ranks know it.
class ByteCounts {
 public:
  explicit ByteCounts(std::size_t ranks) : ranks_(ranks), counts_(ranks * ranks) {}

  std::int64_t& at(std::size_t from, std::size_t to) { return counts_[from * ranks_ + to]; }
  std::int64_t at(std::size_t from, std::size_t to) const { return counts_[from * ranks_ + to]; }
  std::vector<std::int64_t> sent_by(int rank) const {
    std::vector<std::int64_t> counts;
    for (std::size_t to = 0; to < ranks_; ++to) counts.push_back(at(static_cast<std::size_t>(rank), to));
    return counts;
  }
  std::vector<std::int64_t> received_by(int rank) const {
    std::vector<std::int64_t> counts;
    for (std::size_t from = 0; from < ranks_; ++from) {
      counts.push_back(at(from, static_cast<std::size_t>(rank)));
    }
    return counts;
  }
  std::int64_t total() const { return std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0}); }

 private:
  std::size_t ranks_;
  std::vector<std::int64_t> counts_;
};

/// The minimum that another engine must implement to become a backend; SerialBackend does the rest. All calls
/// block, come from one thread, in the same order on all ranks, and have contiguous CPU tensors unless the
/// engine allows others. Exceptions other than Error count as a lost connection.
class BlockingCollectives {
 public:
  virtual ~BlockingCollectives() = default;
  virtual std::string name() const = 0;
  /// In place; called only if reduces() is true.
  virtual void all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual bool reduces(at::ScalarType dtype, ReduceOp reduction) const = 0;
  /// Reduces this rank's part of `tensor`, split evenly, into `part`; returns false if the engine cannot.
  /// Called only if reduces() is true.
  virtual bool reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) {
    static_cast<void>(tensor), static_cast<void>(part), static_cast<void>(reduction);
    return false;
  }
  /// Reduces into the tensor of `root`; those of the other ranks do not change. Returns false if the engine cannot.
  /// Called only if reduces() is true.
  virtual bool reduce(const at::Tensor& tensor, int root, ReduceOp reduction) {
    static_cast<void>(tensor), static_cast<void>(root), static_cast<void>(reduction);
    return false;
  }
  virtual void broadcast(at::Tensor tensor, int root) = 0;
  /// `mine` is bytes; `all` has one row of bytes per rank, each of mine's size.
  virtual void all_gather(at::Tensor mine, at::Tensor all) = 0;
  /// all[rank] has the bytes of that rank, of any size; fills in those of the others. Returns false if the
  /// engine cannot.
  virtual bool all_gather_varied(const std::vector<at::Tensor>& all) {
    static_cast<void>(all);
    return false;
  }
  /// `mine` has the bytes for each rank, by rank; `all` gets those from each.
  virtual void all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) = 0;
  /// Collective over all ranks: makes the collectives of the ranks in `members`, which include this one; null
  /// for a single rank. `number`: SplitPlan::number.
  virtual std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members,
                                                     std::uint64_t number) = 0;
  /// Precedes the calls above for each call of the group; `call` counts these from 1.
  virtual void begin(std::uint64_t call) { static_cast<void>(call); }
  /// Whether abort() notifies all ranks, so that the first failure on one rank is that of all.
  virtual bool announces() const { return false; }
  /// The failure that the engine found or that another rank announced, which breaks the group.
  virtual std::optional<Error> failure() { return std::nullopt; }
  /// The same, if it concerns the call that runs, and not only later ones.
  virtual std::optional<Error> call_failure() { return failure(); }
  /// Names the ranks that the blocked call waits for; empty if the engine does not know.
  virtual std::string awaited() { return {}; }
  /// Calls `wake` on any thread when failure() becomes set. While a call is blocked, calls `interrupted`, which
  /// may be empty, at short intervals; an error that it returns ends the call.
  virtual void watch(std::function<void()> wake, std::function<std::optional<Error>()> interrupted) {
    static_cast<void>(wake), static_cast<void>(interrupted);
  }
  /// How often the group's thread asks for idle_failure() while no call runs; zero: only after `wake`.
  virtual Duration idle_interval() const { return Duration::zero(); }
  /// On any thread: failure(), or one that breaks the group and of which `wake` is not called.
  virtual std::optional<Error> idle_failure() { return failure(); }
  /// On any thread: fails blocked calls and all later ones, as far as the engine can, and sends `cause` to
  /// the ranks that it can reach.
  virtual void abort(const Error& cause) { static_cast<void>(cause); }
  /// As abort(), because call `call` failed on this rank: earlier ones may still complete on others.
  virtual void fail_call(const Error& cause, std::uint64_t call) {
    static_cast<void>(call);
    abort(cause);
  }
  /// As abort(), because this rank leaves the world: other ranks may still complete operations that it has
  /// finished.
  virtual void end(const Error& reason) { abort(reason); }
};

}  // namespace torchspan::collective
