#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/collective.h>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Connects these ranks of the world, one of which is this rank; null for a single rank. `split`: SplitPlan::number, or 0.
using ConnectLeaders = std::function<std::unique_ptr<BlockingCollectives>(const std::vector<int>& world_ranks,
                                                                          std::uint64_t split)>;

struct HierarchyPlan {
  std::vector<int> ranks;  ///< of the world, by rank of the group
  std::vector<int> hosts;  ///< by rank of the group: equal for ranks on one host
  int rank = 0;
  /// The engine between the leaders reduces every dtype and announces failures.
  bool announces = false;
};

/// A group inside each host, and BlockingCollectives between the hosts: data cross the network once per host. The first
/// rank of each host (its leader) exchanges it; of large tensors to reduce, each of the first ranks a slice, so that
/// several cores encrypt, while the hosts work on the next chunk.
class HierarchicalCollectives final : public BlockingCollectives {
 public:
  /// Collective; `local` contains the ranks of this host, in the order of the group.
  HierarchicalCollectives(HierarchyPlan plan, Group local, ConnectLeaders connect, std::uint64_t split = 0);

  std::string name() const override { return "hierarchical"; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  bool reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) override;
  bool reduce(const at::Tensor& tensor, int root, ReduceOp reduction) override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  void all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members, std::uint64_t number) override;
  void begin(std::uint64_t call) override;
  bool announces() const override { return plan_.announces; }
  std::optional<Error> failure() override;
  void watch(std::function<void()> wake, std::function<std::optional<Error>()> interrupted) override;
  Duration idle_interval() const override;
  std::optional<Error> idle_failure() override;
  void abort(const Error& cause) override;
  void fail_call(const Error& cause, std::uint64_t call) override;
  void end(const Error& reason) override;

 private:
  bool leads() const { return local_.rank() == 0; }
  /// The ranks of each host that exchange a tensor of this size.
  int exchangers_of(std::int64_t bytes) const;
  int host_of(int rank) const;
  /// Whether this rank exchanges what its host has, alone.
  bool exchanges() const { return leads() && leaders_ != nullptr; }
  /// Begins to reduce elements [begin, begin + size) of this rank inside its host.
  using ReduceHere = std::function<Future<at::Tensor>(std::int64_t begin, std::int64_t size)>;
  /// Between the hosts: fills in elements from `begin` on of what `reduced` gives, which belong to this rank.
  using Exchange =
      std::function<void(const at::Tensor& reduced, std::int64_t begin, const at::Tensor& result)>;
  /// Fills in `result` (of one dimension) chunk by chunk, of `most` elements: the local group reduces one while the
  /// exchangers work on the one before it, and spreads what each of them got.
  void reduce_in_chunks(const at::Tensor& result, std::int64_t most, const ReduceHere& reduce_here,
                        const Exchange& exchange);
  ByteCounts counts_between_hosts(const ByteCounts& counts) const;
  void exchange_with_other_hosts(const std::vector<at::Tensor>& outgoing,
                                 const std::vector<at::Tensor>& incoming, const ByteCounts& counts,
                                 const ByteCounts& between);

  const HierarchyPlan plan_;
  const Group local_;
  const ConnectLeaders connect_;
  std::vector<std::vector<int>> hosts_;  ///< ranks of the group by host, in the order of their leaders
  bool are_even_ = true;                 ///< each host has as many ranks, which are neighbors in the group
  int exchangers_ = 1;                   ///< the ranks of each host that are connected to others
  std::atomic<bool> ending_{false};      ///< this rank leaves the group; `leaders_` reports that, too
  /// To the ranks at the same place on the other hosts; null for ranks without such connections, or on one host.
  std::unique_ptr<BlockingCollectives> leaders_;
};

}  // namespace torchspan::collective
