#include "net/ucx/ucx_context.h"

#include <array>
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <fmt/format.h>
#include <memory>
#include <string>
#include <ucs/config/global_opts.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

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

namespace {

std::string advice(const UcxOptions& options) {
  if (options.network == UcxNetwork::kIsolated) {
    return "name the network's devices in UcxOptions::devices as 'ucx_info -d' does, or use the tls "
           "transport";
  }
  return "'ucx_info -d' lists the devices. On a network that only the job's workers can reach, "
         "UcxOptions::network = UcxNetwork::kIsolated lets UCX use TCP; otherwise use the tls transport";
}

/// A network device may take a second after it was enabled until it counts as running.
constexpr Duration kDevicesComeUp = std::chrono::seconds(3);
constexpr Duration kDeviceLook = std::chrono::milliseconds(100);

bool supports_cuda(const UcxLibrary& library, ucp_context_h context) {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  return library.context_query(context, &attributes) == UCS_OK &&
         (attributes.memory_types >> static_cast<unsigned>(UCS_MEMORY_TYPE_CUDA) & 1) != 0;
}

}  // namespace

ucs_status_t UcxContext::open(const UcxLibrary& library, const UcxOptions& options, bool with_cuda) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = library.config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("UCX rejects its configuration ({}): check the environment variables UCX_*",
                            library.status_string(status)));
  }
  const std::shared_ptr<ucp_config_t> kept(config, library.config_release);
  const auto set = [&](const char* name, const std::string& value) {
    status = library.config_modify(config, name, value.c_str());
    if (status == UCS_OK) return;
    throw_invalid("UCX rejects {}={}: {}", name, value, library.status_string(status));
  };
  const bool isolated = options.network == UcxNetwork::kIsolated;
  set("TLS", std::string(isolated ? "ib,tcp" : "ib") + (with_cuda ? ",cuda" : ""));
  if (with_cuda) {
    // The older protocols, which the environment can ask for, crash. Future releases may have no others.
    static_cast<void>(library.config_modify(config, "PROTO_ENABLE", "y"));
  }
  // UCX 1.13 aborts (uct_iface.h: comp->count > 0) when a peer dies to which TCP sends memory without a copy.
  if (isolated) set("ZCOPY_THRESH", "inf");
  if (!options.devices.empty()) set("NET_DEVICES", options.devices);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  status = library.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context);
  if (status == UCS_OK) handle_.reset(context);
  return status;
}

UcxContext::UcxContext(Executor& executor, const UcxLibrary& library, const UcxOptions& options,
                       DeviceMemoryKind device_memory)
    : device_memory_(device_memory), handle_(nullptr, library.cleanup) {
  if (device_memory == DeviceMemoryKind::kCuda && !library.can_send_from_cuda())
    device_memory_ = DeviceMemoryKind::kNone;
  const Deadline patience = executor.deadline_in(kDevicesComeUp);
  // Without CUDA first, because with it UCX would not say that there is no network.
  ucs_status_t status = open(library, options, false);
  while (status == UCS_ERR_NO_DEVICE && !patience.passed(executor.now())) {
    executor.sleep(kDeviceLook);
    status = open(library, options, false);
  }
  if (status != UCS_OK) {
    throw Error(ErrorKind::kUnsupported, fmt::format("UCX finds no device that it may use ({}): {}",
                                                     library.status_string(status), advice(options)));
  }
  if (device_memory_ != DeviceMemoryKind::kCuda) return;
  if (open(library, options, true) != UCS_OK || !supports_cuda(library, handle()))
    device_memory_ = DeviceMemoryKind::kNone;
}

}  // namespace torchspan::net
