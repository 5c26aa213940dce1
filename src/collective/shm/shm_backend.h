#pragma once
#include <memory>
#include <vector>

#include <torchspan/collective.h>

#include "collective/api/shares_memory.h"
#include "collective/shm/op_queue.h"

namespace torchspan::collective::shm {

/// The backend for the ranks of one host: bytes go through memory that all of them map. Small tensors are
/// sent with the call, and every rank reduces them; large ones go through staging buffers chunk by chunk. If
/// tensors are in shared memory already, each part is reduced once and written to the tensors of all ranks.
/// All paths sum in the order of ranks 0 to P-1.
class ShmBackend final : public Backend, public SharesMemory {
 public:
  /// Collective over `members` (peer memory ranks, by rank of the group); see GroupMemory::make().
  static std::shared_ptr<ShmBackend> make(std::shared_ptr<PeerMemory> peer_memory, std::vector<int> members,
                                          Duration timeout, const GatherBytes& gather);

  std::string name() const override { return "shm"; }
  int rank() const override { return op_queue_->memory().rank(); }
  const std::vector<int>& ranks() const override { return ranks_; }
  Runtime& runtime() const override { return op_queue_->runtime(); }
  std::shared_ptr<Backend> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) override;
  Future<at::Tensor> reduce_scatter_into(at::Tensor output, at::Tensor tensor, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> all_gather_into(at::Tensor output, at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  Future<std::vector<at::Tensor>> rooted_all_to_all(RootedCall call, std::vector<at::Tensor> parts) override;
  Future<at::Tensor> reduce(at::Tensor tensor, int root, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> coalesced(CoalescedCall call, at::Tensor flat) override;
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override;
  void barrier(Duration timeout) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  std::vector<std::byte*> peer_memory_of(const at::Tensor& mine) override;
  void abort(const Error& cause) override { op_queue_->abort(cause); }
  std::optional<Error> failure() override { return op_queue_->breakage(); }
  void set_instance(std::uint64_t instance) override { op_queue_->set_instance(instance); }

 private:
  explicit ShmBackend(std::shared_ptr<OpQueue> op_queue);

  const std::shared_ptr<OpQueue> op_queue_;
  std::vector<int> ranks_;
};

}  // namespace torchspan::collective::shm
