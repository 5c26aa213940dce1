#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/collective/group.h>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Connects these ranks of the world, one of which is this rank; null for a single rank.
using ConnectLeaders =
    std::function<std::unique_ptr<BlockingCollectives>(const std::vector<int>& world_ranks)>;

struct HierarchyPlan {
  std::vector<int> ranks;  ///< of the world, by rank of the group
  std::vector<int> hosts;  ///< by rank of the group: equal for ranks on one host
  int rank = 0;
  /// The engine between the leaders reduces every dtype and announces failures.
  bool announces = false;
};

/// A group inside each host, and BlockingCollectives between the first ranks of the hosts (leaders): large
/// tensors cross the network once per host, while the hosts work on the next chunk.
class HierarchicalCollectives final : public BlockingCollectives {
 public:
  /// Collective; `local` contains the ranks of this host, in the order of the group.
  HierarchicalCollectives(HierarchyPlan plan, Group local, ConnectLeaders connect);

  std::string name() const override { return "hierarchical"; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                  const std::vector<std::int64_t>& all_counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) override;
  void begin(std::uint64_t call) override;
  bool announces() const override { return plan_.announces; }
  std::optional<Error> failure() override;
  void watch(std::function<void()> wake, std::function<std::optional<Error>()> interrupted) override;
  void abort(const Error& cause) override;
  void fail_call(const Error& cause) override;
  void end(const Error& reason) override;

 private:
  bool leads() const { return local_.rank() == 0; }
  int host_of(int rank) const;
  /// Among leaders: blocks[host] has the bytes of that host.
  void exchange_blocks(const std::vector<at::Tensor>& blocks);

  const HierarchyPlan plan_;
  const Group local_;
  const ConnectLeaders connect_;
  std::vector<std::vector<int>> hosts_;  ///< ranks of the group by host, in the order of their leaders
  std::unique_ptr<BlockingCollectives> leaders_;  ///< on leaders, if there are several hosts
};

}  // namespace torchspan::collective
