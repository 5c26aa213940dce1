#pragma once
#include <memory>
#include <string>

#include <torchspan/collective.h>

#include "collective/ipc/ipc_engine.h"
#include "device/api/device_runtime.h"

namespace torchspan::collective {

/// What groups on devices are made with; tests of groups pass others than the default.
struct DeviceServices {
  std::shared_ptr<const device::DeviceRuntime> runtime;  ///< null: this build has none
  std::string nccl_library = {};                         ///< as for NcclLibrary::load()
  ipc::IpcOptions ipc = {};
};

/// Group::make() with these services.
Group make_group(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world, GroupOptions options,
                 DeviceServices services);

}  // namespace torchspan::collective
