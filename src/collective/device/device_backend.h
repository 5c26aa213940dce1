#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective.h>

#include "collective/device/device_queue.h"

namespace torchspan::collective {

/// A backend for tensors on one device per rank: a control group for tensors on the CPU, bytes, barriers and
/// agreement, and an engine for tensors on the device. The two have separate orders: an operation on the CPU may
/// complete before an earlier one on the device.
class DeviceBackend final : public Backend {
 public:
  struct Plan {
    EngineFactory engine;
    std::shared_ptr<const device::DeviceRuntime> runtime;
    DeviceQueueOptions queue;  ///< make() adds `ranks`, `rank` and `gone`
  };
  /// Collective over `made`, a group for the CPU that only this backend uses.
  static std::shared_ptr<DeviceBackend> make(std::shared_ptr<Backend> made, Plan plan);

  std::string name() const override { return queue_->engine().name(); }
  int rank() const override { return control().rank(); }
  const std::vector<int>& ranks() const override { return control().ranks(); }
  Runtime& runtime() const override { return control().runtime(); }
  bool takes(c10::Device device) const override;
  std::shared_ptr<Backend> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  Future<at::Tensor> reduce(at::Tensor tensor, int root, ReduceOp reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  Future<std::vector<at::Tensor>> rooted_all_to_all(RootedCall call, std::vector<at::Tensor> parts) override;
  Future<std::vector<at::Tensor>> coalesced(CoalescedCall call, at::Tensor flat) override;
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override;
  void barrier(Duration timeout) override { control().barrier(timeout); }
  /// On the CPU; see Group::allocate().
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort(const Error& cause) override;
  /// Of the device, or of the CPU.
  std::optional<Error> failure() override {
    const auto cause = queue_->failure()->get();
    return cause ? cause : control().failure();
  }
  void set_instance(std::uint64_t instance) override { queue_->set_instance(instance); }

 private:
  DeviceBackend(Plan plan, std::shared_ptr<DeviceQueue> queue)
      : plan_(std::move(plan)), queue_(std::move(queue)) {}

  Backend& control() const { return queue_->control(); }

  const Plan plan_;
  const std::shared_ptr<DeviceQueue> queue_;
};

}  // namespace torchspan::collective
