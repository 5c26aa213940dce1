#pragma once
// Groups on the stand-in devices, for the conformance suite.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>

#include <torchspan/collective.h>

#include "collective/api/device_services.h"
#include "tests/support/fake_nccl/fake_nccl.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::testing {

/// Passes every tensor through a group's device: copies it there, calls the group, and copies the result back. So
/// the suite's tests of CPU tensors test the device. Sparse tensors stay on the CPU, because LibTorch has none on
/// the stand-in device.
class ThroughDevice final : public collective::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  ThroughDevice(std::shared_ptr<collective::Backend> inner, c10::Device device)
      : inner_(std::move(inner)), device_(device) {}

  std::string name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  const std::vector<int>& ranks() const override { return inner_->ranks(); }
  Runtime& runtime() const override { return inner_->runtime(); }
  std::shared_ptr<Backend> split(int color, int key) override {
    return std::make_shared<ThroughDevice>(inner_->split(color, key), device_);
  }
  Future<at::Tensor> all_reduce(at::Tensor tensor, collective::ReduceOp reduction) override {
    if (tensor.is_sparse()) return inner_->all_reduce(std::move(tensor), reduction);
    return brought_back(tensor, inner_->all_reduce(there(tensor), reduction));
  }
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, collective::ReduceOp reduction) override {
    return inner_->reduce_scatter(there(tensor), reduction).then([](const Future<at::Tensor>& part) {
      return part.wait().cpu();
    });
  }
  Future<Tensors> all_gather(at::Tensor tensor) override { return here(inner_->all_gather(there(tensor))); }
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override {
    return brought_back(tensor, inner_->broadcast(there(tensor), root));
  }
  Future<Tensors> all_to_all(Tensors parts) override {
    for (at::Tensor& part : parts) part = there(part);
    return here(inner_->all_to_all(std::move(parts)));
  }
  Future<Tensors> rooted_all_to_all(collective::RootedCall call, Tensors parts) override {
    for (at::Tensor& part : parts) part = there(part);
    return here(inner_->rooted_all_to_all(call, std::move(parts)));
  }
  Future<Tensors> coalesced(collective::CoalescedCall call, at::Tensor flat) override {
    return here(inner_->coalesced(std::move(call), there(flat)));
  }
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override {
    return inner_->all_gather_bytes(mine, timeout);
  }
  void barrier(Duration timeout) override { inner_->barrier(timeout); }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return inner_->allocate(sizes, dtype);
  }
  void abort(const Error& cause) override { inner_->abort(cause); }

 private:
  at::Tensor there(const at::Tensor& tensor) const { return tensor.detach().to(device_); }
  static Future<Tensors> here(const Future<Tensors>& results) {
    return results.then([](const Future<Tensors>& done) {
      Tensors copies;
      for (const at::Tensor& tensor : done.wait()) copies.push_back(tensor.cpu());
      return copies;
    });
  }
  static Future<at::Tensor> brought_back(const at::Tensor& tensor, const Future<at::Tensor>& result) {
    return result.then([tensor](const Future<at::Tensor>& done) {
      tensor.detach().copy_(done.wait());
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      return tensor;
    });
  }

  const std::shared_ptr<collective::Backend> inner_;
  const c10::Device device_;
};

/// Small areas, so that tensors of the suite need several chunks.
inline collective::DeviceServices stand_in_services(collective::BackendKind kind) {
  return {.runtime = std::make_shared<StandInRuntime>(kind == collective::BackendKind::kCudaIpc),
          .nccl_library = fake_nccl(),
          .ipc = {.area_bytes = std::size_t{96} << 10}};
}

inline bool is_device_kind(collective::BackendKind kind) {
  return kind == collective::BackendKind::kNccl || kind == collective::BackendKind::kCudaIpc;
}

/// Group::make(), on the stand-in device if the options name a backend for devices.
inline collective::Group make_group_of_row(Runtime& runtime, rendezvous::Membership& world,
                                           collective::GroupOptions options) {
  if (!is_device_kind(options.backend)) return collective::Group::make(runtime, world, std::move(options));
  options.device = stand_in(0);
  const auto services = stand_in_services(options.backend);
  return collective::make_group(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime), world,
                                std::move(options), services);
}

/// The same group, whose tensors on the CPU go through the device.
inline collective::Group make_group_of_suite(Runtime& runtime, rendezvous::Membership& world,
                                             collective::GroupOptions options) {
  const bool on_device = is_device_kind(options.backend);
  const collective::Group inner = make_group_of_row(runtime, world, std::move(options));
  if (!on_device || inner.size() == 1) return inner;
  return collective::Group(std::make_shared<ThroughDevice>(inner.backend(), stand_in(0)));
}

}  // namespace torchspan::testing
