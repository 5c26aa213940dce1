#include "net/ucx/ucx_context.h"

#include <fmt/format.h>
#include <memory>
#include <string>

namespace torchspan::net {
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
    throw Error(ErrorKind::kInvalid,
                fmt::format("UCX rejects {}={}: {}", name, value, library.status_string(status)));
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
