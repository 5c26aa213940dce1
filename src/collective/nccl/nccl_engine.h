#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/nccl/nccl_communicator.h"

namespace torchspan::collective::nccl {

/// An engine over NCCL, for ranks with a GPU each. NCCL rounds 16-bit floats after every addition, and adds in an
/// order that depends on the topology: the bits are equal on all ranks, and from run to run on the same machines.
class NcclEngine final : public DeviceEngine {
 public:
  /// Collective; see NcclCommunicator.
  NcclEngine(std::shared_ptr<const NcclLibrary> library, const EngineParts& parts)
      : communicator_(std::move(library), parts) {}

  std::string name() const override { return "nccl"; }
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override;
  void all_reduce(const at::Tensor& tensor, ReduceOp reduction) override;
  void reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) override;
  void broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) override;
  void all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) override;
  std::optional<Error> failure() override { return communicator_.failure(); }
  void abort() noexcept override { communicator_.abort(); }

 private:
  NcclCommunicator communicator_;
};

}  // namespace torchspan::collective::nccl
