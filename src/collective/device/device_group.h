#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/api/device_services.h"
#include "collective/world_link.h"
#include "core/api/agreement.h"

namespace torchspan::collective {

struct DeviceGroupPlan {
  c10::Device device;
  BackendKind backend = BackendKind::kAutomatic;
  GroupMembers members = {};
  std::vector<std::string> hosts = {};  ///< by rank of the group
  int rank = 0;
  ProcessGroupFactory process_group = {};  ///< for kC10d
  Duration timeout{};
  std::shared_ptr<WorldLink> world = {};
  GatherBytes gather = {};                                 ///< bytes of every rank, by rank
  std::function<std::shared_ptr<Backend>()> control = {};  ///< collective: the group for the CPU
};

/// Collective: selects and makes a backend for ranks that have a device each. Throws the same error on all ranks
/// if a device, a driver or a library is missing on one of them, or if the devices cannot work together.
std::shared_ptr<Backend> make_device_backend(const DeviceServices& services, const DeviceGroupPlan& plan);

/// Throws unless this process has the device; adds the current index if there is none.
c10::Device check_device_exists(c10::Device device);

}  // namespace torchspan::collective
