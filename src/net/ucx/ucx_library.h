#pragma once
#include <ucp/api/ucp.h>

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

}  // namespace torchspan::net
