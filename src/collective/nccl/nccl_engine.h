#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/device/device_engine.h"
#include "collective/nccl/nccl_library.h"

namespace torchspan::collective::nccl {

/// One communicator of NCCL, in its mode that never blocks the host: every call is polled until NCCL has accepted
/// it, and given up when the group has failed or after its timeout. Used by one thread at a time.
class NcclCommunicator {
 public:
  /// Collective over parts.control. Throws on all ranks if one of them fails.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const EngineParts& parts);
  /// Aborts the communicator if the group has failed; else lets its operations end, and meets the other ranks.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Makes a call to NCCL, and waits until NCCL has accepted it.
  using Call = std::function<Result(const NcclLibrary::Functions&, CommunicatorHandle, StreamHandle)>;
  void enqueue(const char* name, const Call& call);
  /// The failure of an operation that NCCL reports; nullopt if there is none.
  std::optional<Error> failure() const;
  void abort() noexcept;

 private:
  void connect(const UniqueId& id);
  /// Waits while NCCL works on a call; throws its error.
  void settle(Result result, const char* name, Deadline deadline) const;
  void throw_if_failed() const;
  Error error_of(Result result, const char* name) const;

  const std::shared_ptr<const NcclLibrary> library_;
  const EngineParts parts_;
  CommunicatorHandle handle_ = nullptr;
};

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
