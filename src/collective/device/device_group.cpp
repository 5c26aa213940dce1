#include "collective/device/device_group.h"

#include <algorithm>
#include <fmt/format.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "collective/c10d/c10d_engine.h"
#include "collective/device/device_backend.h"
#include "collective/nccl/nccl_engine.h"
#include "collective/single.h"
#include "core/api/throw_invalid.h"
#include "device/api/devices.h"

namespace torchspan::collective {
namespace {

/// What a rank sends to the others about its device.
struct DeviceFacts {
  std::string device = {};
  std::string identity = {};
  std::string trouble = {};       ///< why it cannot take part; empty if it can
  std::string nccl_trouble = {};  ///< why it has no NCCL
  bool shares_gpu = false;        ///< its NCCL lets ranks share a GPU

  Bytes encode() const {
    ByteWriter writer;
    for (const std::string& text : {device, identity, trouble, nccl_trouble}) writer.put_string(text);
    writer.put(static_cast<std::uint8_t>(shares_gpu ? 1 : 0));
    return writer.take();
  }
  static DeviceFacts decode(BytesView bytes) {
    ByteReader reader(bytes);
    DeviceFacts facts;
    for (std::string* text : {&facts.device, &facts.identity, &facts.trouble, &facts.nccl_trouble}) {
      *text = reader.get_string();
    }
    facts.shares_gpu = reader.get<std::uint8_t>() != 0;
    return facts;
  }
};

class Selection {
 public:
  Selection(const DeviceServices& services, const DeviceGroupPlan& plan)
      : services_(services), plan_(plan), device_(plan.device) {}

  std::shared_ptr<Backend> make() {
    for (const Bytes& bytes : plan_.gather(find_facts().encode()))
      facts_.push_back(DeviceFacts::decode(bytes));
    for (std::size_t rank = 0; rank < facts_.size(); ++rank) {
      if (facts_[rank].trouble.empty()) continue;
      throw Error(ErrorKind::kUnsupported, fmt::format("{} cannot use {}: {}", plan_.members.names[rank],
                                                       facts_[rank].device, facts_[rank].trouble));
    }
    const EngineFactory engine = select();
    DeviceQueueOptions queue{
        .device = device_, .members = plan_.members, .timeout = plan_.timeout, .world = plan_.world};
    return DeviceBackend::make(plan_.control(),
                               {.engine = engine, .runtime = services_.runtime, .queue = std::move(queue)});
  }

 private:
  DeviceFacts find_facts() {
    DeviceFacts facts{.device = device_.str()};
    try {
      device_ = check_device_exists(device_);
      facts.device = device_.str();
      if (plan_.backend == BackendKind::kC10d) {
        if (plan_.process_group) return facts;
        throw_invalid(
            "GroupOptions::backend is kC10d, but GroupOptions::process_group, which makes the process group "
            "for the device, is not set");
      }
      if (!services_.runtime || services_.runtime->type() != device_.type()) {
        throw Error(
            ErrorKind::kUnsupported,
            "TorchSpan was built without CUDA's runtime: configure it with TORCHSPAN_CUDA=ON and a CUDA "
            "toolkit, or make the group without GroupOptions::device");
      }
      facts.identity = services_.runtime->identity(device_);
    } catch (const Error& error) {
      facts.trouble = error.message();
    } catch (...) {
      facts.trouble = torchspan::describe(std::current_exception()).text;
    }
    try {
      if (plan_.backend != BackendKind::kCudaIpc) nccl_ = nccl::NcclLibrary::load(services_.nccl_library);
      facts.shares_gpu = nccl_ && nccl::may_share_gpu(*nccl_);
    } catch (const Error& error) {
      facts.nccl_trouble = error.message();
    }
    return facts;
  }

  EngineFactory select() {
    const std::string shared = shared_gpu();
    const std::string missing = missing_nccl();
    const std::string apart = several_hosts();
    switch (plan_.backend) {
      case BackendKind::kNccl:
        for (const std::string& why : {missing, shared}) {
          if (!why.empty()) throw Error(ErrorKind::kUnsupported, why);
        }
        return over_nccl();
      case BackendKind::kCudaIpc:
        if (!apart.empty()) throw Error(ErrorKind::kUnsupported, apart);
        return over_ipc();
      case BackendKind::kC10d:
        return over_c10d();
      case BackendKind::kAutomatic:
        if (missing.empty() && shared.empty()) return over_nccl();
        if (apart.empty()) return over_ipc();
        throw Error(ErrorKind::kUnsupported, missing.empty() ? shared : missing);
      default:
        throw_invalid(
            "GroupOptions::device is {}, but GroupOptions::backend names a backend for the CPU: choose "
            "kAutomatic, kNccl, kCudaIpc or kC10d",
            device_.str());
    }
  }

  std::string missing_nccl() const {
    for (std::size_t rank = 0; rank < facts_.size(); ++rank) {
      if (!facts_[rank].nccl_trouble.empty())
        return fmt::format("{}: {}", plan_.members.names[rank], facts_[rank].nccl_trouble);
    }
    return {};
  }

  std::string shared_gpu() const {
    const bool allowed =
        std::all_of(facts_.begin(), facts_.end(), [](const DeviceFacts& facts) { return facts.shares_gpu; });
    for (std::size_t one = 0; one < facts_.size() && !allowed; ++one) {
      for (std::size_t other = 0; other < one; ++other) {
        if (facts_[one].identity != facts_[other].identity) continue;
        return fmt::format(
            "{} ({}) and {} ({}) share one GPU ({}), which NCCL refuses: give each rank its own "
            "device, or use BackendKind::kCudaIpc",
            plan_.members.names[other], facts_[other].device, plan_.members.names[one], facts_[one].device,
            facts_[one].identity);
      }
    }
    return {};
  }

  std::string several_hosts() const {
    for (std::size_t rank = 1; rank < plan_.hosts.size(); ++rank) {
      if (plan_.hosts[rank] == plan_.hosts[0]) continue;
      return fmt::format(
          "{} and {} are on different hosts, whose processes cannot map each other's device "
          "memory: use BackendKind::kNccl",
          plan_.members.names[0], plan_.members.names[rank]);
    }
    return {};
  }

  EngineFactory over_nccl() const {
    return [library = nccl_](EngineParts parts) -> std::unique_ptr<DeviceEngine> {
      return std::make_unique<nccl::NcclEngine>(library, parts);
    };
  }
  EngineFactory over_ipc() const {
    return [options = services_.ipc](EngineParts parts) -> std::unique_ptr<DeviceEngine> {
      return ipc::IpcEngine::make(std::move(parts), options);
    };
  }

  EngineFactory over_c10d() const {
    return [factory = plan_.process_group](EngineParts parts) -> std::unique_ptr<DeviceEngine> {
      return C10dEngine::make(factory, parts);
    };
  }

  const DeviceServices& services_;
  const DeviceGroupPlan& plan_;
  c10::Device device_;
  std::shared_ptr<const nccl::NcclLibrary> nccl_;
  std::vector<DeviceFacts> facts_;  ///< by rank
};

}  // namespace

c10::Device check_device_exists(c10::Device device) {
  const device::DeviceCount here = device::count_devices(device.type());
  const std::string why = device::why_absent(device, here);
  if (!why.empty()) {
    throw Error(here.count == 0 ? ErrorKind::kUnsupported : ErrorKind::kInvalid,
                fmt::format("there is no {}: {}", device.str(), why));
  }
  return device.has_index() ? device : c10::impl::getDeviceGuardImpl(device.type())->getDevice();
}

std::shared_ptr<Backend> make_device_backend(const DeviceServices& services, const DeviceGroupPlan& plan) {
  return Selection(services, plan).make();
}

}  // namespace torchspan::collective
