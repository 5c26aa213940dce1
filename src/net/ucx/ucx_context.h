#pragma once
#include <memory>
#include <type_traits>
#include <ucp/api/ucp.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "net/api/ucx.h"

namespace torchspan::net {

/// UCX's functions. UCX is loaded, not linked, because a linked UCX handles the signals of every program (a
/// backtrace on SIGSEGV, a debugger on SIGHUP). After loading, the signal handlers are restored. Never
/// unloaded.
struct UcxLibrary {
  /// Throws kUnsupported if UCX is not installed or too old.
  UcxLibrary();

  /// Whether a worker may be destroyed before its endpoints have sent their part of connecting. UCX 1.13 aborts
  /// then (ucp_request.c: "got REP message"); the assertion was removed in 1.14.
  bool can_destroy_while_connecting() const { return major > 1 || minor >= 14; }

  /// Whether active messages may be in CUDA memory on any thread. Releases before 1.19 need a CUDA context there.
  bool can_send_from_cuda() const { return major > 1 || minor >= 19; }

  unsigned major = 0;
  unsigned minor = 0;
  decltype(&::ucp_config_read) config_read = nullptr;
  decltype(&::ucp_config_modify) config_modify = nullptr;
  decltype(&::ucp_config_release) config_release = nullptr;
  decltype(&::ucp_init_version) init_version = nullptr;
  decltype(&::ucp_cleanup) cleanup = nullptr;
  decltype(&::ucp_context_query) context_query = nullptr;
  decltype(&::ucp_worker_create) worker_create = nullptr;
  decltype(&::ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&::ucp_worker_get_address) worker_get_address = nullptr;
  decltype(&::ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&::ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&::ucp_worker_arm) worker_arm = nullptr;
  decltype(&::ucp_worker_progress) worker_progress = nullptr;
  decltype(&::ucp_worker_set_am_recv_handler) set_am_handler = nullptr;
  decltype(&::ucp_ep_create) ep_create = nullptr;
  decltype(&::ucp_ep_flush_nbx) ep_flush = nullptr;
  decltype(&::ucp_ep_close_nbx) ep_close = nullptr;
  decltype(&::ucp_am_send_nbx) am_send = nullptr;
  decltype(&::ucp_am_recv_data_nbx) am_receive = nullptr;
  decltype(&::ucp_am_data_release) am_release = nullptr;
  decltype(&::ucp_request_free) request_free = nullptr;
  decltype(&::ucs_status_string) status_string = nullptr;
};

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
