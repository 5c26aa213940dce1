#pragma once
#include <memory>
#include <type_traits>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "net/api/ucx.h"
#include "net/ucx/ucx_library.h"

namespace torchspan::net {

/// UCX's context: the devices of a worker.
class UcxContext {
 public:
  /// `device_memory`: in which segments may be, if UCX supports it. Waits for a network device that
  /// comes up. Throws kUnsupported if UCX has no device that `options` allow, kInvalid if it rejects them.
  UcxContext(Executor& executor, const UcxLibrary& library, const UcxOptions& options,
             DeviceMemoryKind device_memory);

  ucp_context_h handle() const { return handle_.get(); }
  /// Never frees the context, which a worker of UCX goes on using.
  void leak() { static_cast<void>(handle_.release()); }
  /// In which memory segments with a device_target are.
  DeviceMemoryKind device_memory() const { return device_memory_; }

 private:
  /// Replaces `handle_` unless UCX reports an error.
  ucs_status_t open(const UcxLibrary& library, const UcxOptions& options, bool with_cuda);

  DeviceMemoryKind device_memory_;
  std::unique_ptr<std::remove_pointer_t<ucp_context_h>, decltype(&::ucp_cleanup)> handle_;
};

}  // namespace torchspan::net
