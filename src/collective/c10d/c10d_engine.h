#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torchspan/collective.h>

#include "collective/device/device_engine.h"

namespace c10d {
class Work;
}

namespace torchspan::collective {
namespace compat {
class AbortableWork;
}

/// An engine over any LibTorch process group that takes tensors on the device, such as LibTorch's NCCL. It does what
/// the process group does: timeouts, order of sums, and whether a failure ends the process. Its wait() must not block
/// the host: otherwise, only the process group's own timeout ends work whose other ranks are missing.
class C10dEngine final : public DeviceEngine {
 public:
  /// Collective; throws the same error on all ranks if one cannot make its part, or makes another one.
  static std::unique_ptr<C10dEngine> make(const ProcessGroupFactory& factory, const EngineParts& parts);
  ~C10dEngine() override;

  std::string name() const override { return "c10d"; }
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void all_reduce(const at::Tensor& tensor, ReduceOp reduction) override;
  void reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) override;
  void broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) override;
  void all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) override;
  /// Ends nothing if the process group, or before LibTorch 2.7 its work, cannot be aborted. Tries it once.
  void abort() noexcept override;

 private:
  explicit C10dEngine(c10::intrusive_ptr<c10d::ProcessGroup> group);
  /// The process group; throws if it was aborted.
  c10d::ProcessGroup& running() const;
  /// Makes the current stream wait for the work.
  void wait(const c10::intrusive_ptr<c10d::Work>& work);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::unique_ptr<compat::AbortableWork> works_;
  bool aborted_ = false;
};

}  // namespace torchspan::collective
