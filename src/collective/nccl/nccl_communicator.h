#pragma once
#include <functional>
#include <memory>
#include <optional>

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

}  // namespace torchspan::collective::nccl
