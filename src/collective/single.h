#pragma once
#include <vector>

#include <torchspan/collective.h>

#include "collective/world_link.h"

namespace torchspan::collective {

/// A group of one rank: every operation completes at once.
class SingleBackend final : public Backend, public WorldListener {
 public:
  /// `world` may be null; then the group never ends. Keeps the runtime alive, because users of the group use
  /// it. Takes tensors on the CPU and on `device`.
  static std::shared_ptr<SingleBackend> make(int world_rank, std::shared_ptr<Runtime> runtime,
                                             std::shared_ptr<WorldLink> world,
                                             c10::Device device = c10::kCPU);

  std::string name() const override { return "single"; }
  int rank() const override { return 0; }
  const std::vector<int>& ranks() const override { return ranks_; }
  Runtime& runtime() const override { return *runtime_; }
  bool takes(c10::Device device) const override { return device.is_cpu() || device == device_; }
  std::shared_ptr<Backend> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override;
  void barrier(Duration timeout) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort(const Error& cause) override;
  std::optional<Error> failure() override {
    MutexLock lock(mutex_);
    return aborted_;
  }

  void member_died(const rendezvous::Member&, const Error&) override {}
  void member_left(const rendezvous::Member&) override {}
  void world_ended(const Error& reason) override { abort(reason); }
  void world_closing() override {}

 private:
  SingleBackend(int world_rank, std::shared_ptr<Runtime> runtime, std::shared_ptr<WorldLink> world,
                c10::Device device)
      : runtime_(std::move(runtime)), world_(std::move(world)), ranks_{world_rank}, device_(device) {}
  void throw_if_aborted();

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<WorldLink> world_;
  const std::vector<int> ranks_;
  const c10::Device device_;
  Mutex mutex_;
  std::optional<Error> aborted_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::collective
