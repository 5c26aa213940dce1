#include "net/ucx/ucx_library.h"

#include <array>
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <fmt/format.h>
#include <string>
#include <ucs/config/global_opts.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr const char* kFile = "libucp.so.0";
constexpr int kSignals = 32;

/// Saves the signal handlers of this process; the destructor restores them.
class SignalsKept {
 public:
  SignalsKept() {
    for (int signal = 1; signal < kSignals; ++signal) {
      known_[signal] = ::sigaction(signal, nullptr, &before_[signal]) == 0;
    }
  }
  ~SignalsKept() {
    for (int signal = 1; signal < kSignals; ++signal) {
      struct sigaction now {};
      if (!known_[signal] || ::sigaction(signal, nullptr, &now) != 0) continue;
      if (now.sa_sigaction != before_[signal].sa_sigaction) ::sigaction(signal, &before_[signal], nullptr);
    }
  }
  SignalsKept(const SignalsKept&) = delete;
  SignalsKept& operator=(const SignalsKept&) = delete;

 private:
  std::array<bool, kSignals> known_{};
  std::array<struct sigaction, kSignals> before_{};
};

void* open_library() {
  const SignalsKept kept;
  void* library = ::dlopen(kFile, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("UCX cannot be loaded ({}): install it (Debian: libucx0), or use the tls transport",
                    ::dlerror()));
  }
  return library;
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function != nullptr) return;
  throw Error(ErrorKind::kUnsupported,
              fmt::format("the UCX in {} has no {}: install UCX 1.13 or later", kFile, name));
}

/// UCX writes warnings about unrelated devices to standard output; UCX_LOG_LEVEL turns them on.
void silence_ucx_log(void* library) {
  if (std::getenv("UCX_LOG_LEVEL") != nullptr) return;
  decltype(&::ucs_global_opts_set_value) set = nullptr;
  find(library, "ucs_global_opts_set_value", set);
  set("LOG_LEVEL", "fatal");
}

}  // namespace

UcxLibrary::UcxLibrary() {
  void* const library = open_library();
  decltype(&::ucp_get_version) get_version = nullptr;
  find(library, "ucp_get_version", get_version);
  unsigned release = 0;
  get_version(&major, &minor, &release);
  silence_ucx_log(library);
  find(library, "ucp_config_read", config_read);
  find(library, "ucp_config_modify", config_modify);
  find(library, "ucp_config_release", config_release);
  find(library, "ucp_init_version", init_version);
  find(library, "ucp_cleanup", cleanup);
  find(library, "ucp_context_query", context_query);
  find(library, "ucp_worker_create", worker_create);
  find(library, "ucp_worker_destroy", worker_destroy);
  find(library, "ucp_worker_get_address", worker_get_address);
  find(library, "ucp_worker_release_address", worker_release_address);
  find(library, "ucp_worker_get_efd", worker_get_efd);
  find(library, "ucp_worker_arm", worker_arm);
  find(library, "ucp_worker_progress", worker_progress);
  find(library, "ucp_worker_set_am_recv_handler", set_am_handler);
  find(library, "ucp_ep_create", ep_create);
  find(library, "ucp_ep_flush_nbx", ep_flush);
  find(library, "ucp_ep_close_nbx", ep_close);
  find(library, "ucp_am_send_nbx", am_send);
  find(library, "ucp_am_recv_data_nbx", am_receive);
  find(library, "ucp_am_data_release", am_release);
  find(library, "ucp_request_free", request_free);
  find(library, "ucs_status_string", status_string);
}

}  // namespace torchspan::net
