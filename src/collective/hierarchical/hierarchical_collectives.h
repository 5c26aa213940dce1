#pragma once
#include <functional>
#include <memory>
#include <vector>

#include <torchspan/collective/group.h>

#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective {

/// Connects the given ranks of the world, including this one; null for one rank alone.
using ConnectLeaders =
    std::function<std::unique_ptr<BlockingCollectives>(const std::vector<int>& world_ranks)>;

struct HierarchyPlan {
  std::vector<int> ranks;  ///< of the world, by rank of the group
  std::vector<int> hosts;  ///< by rank of the group: numbers that are equal on one host
  int rank = 0;
};

/// Combines a group inside each host with an engine between the first ranks of the hosts, the leaders. Large
/// tensors cross the network once per host.
class HierarchicalCollectives final : public BlockingCollectives {
 public:
  /// Collective; `local` contains the ranks of this host in the order of the group.
  HierarchicalCollectives(HierarchyPlan plan, Group local, ConnectLeaders connect);

  std::string name() const override { return "hierarchical"; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  void all_to_all(at::Tensor mine, const std::vector<std::int64_t>& mine_counts, at::Tensor all,
                  const std::vector<std::int64_t>& all_counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members) override;
  void abort(const Error& cause) override;
  void end(const Error& reason) override;

 private:
  bool leads() const { return local_.rank() == 0; }
  int host_of(int rank) const;

  const HierarchyPlan plan_;
  const Group local_;
  const ConnectLeaders connect_;
  std::vector<std::vector<int>> hosts_;  ///< ranks of the group by host, in the order of their leaders
  std::unique_ptr<BlockingCollectives> leaders_;  ///< on a leader, if there are several hosts
};

}  // namespace torchspan::collective
