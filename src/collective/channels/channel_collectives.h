#pragma once
#include <memory>
#include <vector>

#include "collective/channels/mesh.h"
#include "collective/serial/blocking_collectives.h"

namespace torchspan::collective::channels {

/// BlockingCollectives over a Mesh: the group's own connections. Reduces every dtype, in the order of ranks.
class ChannelCollectives final : public BlockingCollectives {
 public:
  /// Collective over `ranks`; see Mesh.
  ChannelCollectives(std::shared_ptr<WorldLink> world, std::vector<int> ranks, MeshOptions options);

  std::string name() const override { return "network"; }
  void all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  bool reduces(at::ScalarType, ReduceOp) const override { return true; }
  bool reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) override;
  bool reduce(const at::Tensor& tensor, int root, ReduceOp reduction) override;
  void broadcast(at::Tensor tensor, int root) override;
  void all_gather(at::Tensor mine, at::Tensor all) override;
  bool all_gather_varied(const std::vector<at::Tensor>& all) override;
  void all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) override;
  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members, std::uint64_t number) override;
  void begin(std::uint64_t call) override { mesh_.begin_call(call); }
  bool announces() const override { return true; }
  std::optional<Error> failure() override { return mesh_.inbox().failure(); }
  std::optional<Error> call_failure() override { return mesh_.inbox().call_failure(); }
  std::string awaited() override { return mesh_.inbox().awaited(); }
  void watch(std::function<void()> wake, std::function<std::optional<Error>()> interrupted) override;
  void abort(const Error& cause) override { mesh_.abort(cause); }
  void fail_call(const Error& cause, std::uint64_t call) override { mesh_.abort(cause, call); }
  void end(const Error& reason) override { mesh_.end(reason); }

 private:
  const std::shared_ptr<WorldLink> world_;
  const std::vector<int> ranks_;
  const MeshOptions options_;
  Mesh mesh_;
};

/// Null for a single rank.
std::unique_ptr<BlockingCollectives> connect_channels(const std::shared_ptr<WorldLink>& world,
                                                      const std::vector<int>& ranks, MeshOptions options);

}  // namespace torchspan::collective::channels
