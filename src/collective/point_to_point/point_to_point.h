#pragma once
#include <atomic>
#include <memory>

#include <torchspan/detail/device/streams.h>

#include "collective/group_executor.h"
#include "collective/point_to_point/message_loop.h"

namespace torchspan::collective {

/// send() and recv() of a group, whatever its backend: over connections between the pairs of ranks that use them, which
/// the first call makes. Follows the group's world.
class PointToPoint final : public WorldListener {
 public:
  static std::shared_ptr<PointToPoint> make(PairPlan plan, std::shared_ptr<Backend> backend);
  /// Fails pending operations with kCancelled.
  ~PointToPoint() override;
  PointToPoint(const PointToPoint&) = delete;

  std::uint64_t group() const { return loop_.plan().group; }
  /// The number of a split; all ranks call it for every split.
  std::uint64_t next_split() { return splits_.fetch_add(1) + 1; }
  /// The same for a part that a split made of the group; null for one rank.
  std::shared_ptr<PointToPoint> of_part(std::shared_ptr<Backend> part, std::uint64_t split);

  /// For dense tensors; `peer` is another rank of the group. Those on a device pass through the CPU.
  Future<at::Tensor> send(const at::Tensor& tensor, int peer, int tag);
  Future<at::Tensor> recv(const at::Tensor& tensor, int peer, int tag);
  Future<ReceivedMessage> recv_from_any(const at::Tensor& tensor, int tag);

  void member_died(const rendezvous::Member& member, const Error& reason) override;
  void member_left(const rendezvous::Member&) override {}  // it ends its connections
  void world_ended(const Error& reason) override;
  void world_closing() override;

 private:
  PointToPoint(PairPlan plan, std::shared_ptr<Backend> backend);
  void submit(MessageOperation operation);

  std::atomic<std::uint64_t> splits_{0};
  std::shared_ptr<GroupExecutor> continuations_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();  ///< for tensors on devices
  MessageLoop loop_;
};

}  // namespace torchspan::collective
