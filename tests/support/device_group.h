#pragma once
// A rank of a group on the stand-in device, in a process that ProcessWorld started.
#include <functional>
#include <memory>
#include <utility>

#include <torchspan/collective/group.h>
#include <torchspan/core/log.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "collective/api/device_services.h"
#include "rendezvous/api/files.h"
#include "tests/support/test_device.h"

namespace torchspan::testing {

inline collective::DeviceServices ipc_services() {
  return {.runtime = test_runtime(), .ipc = {.area_bytes = std::size_t{16} << 10}};
}
inline collective::GroupOptions ipc_options() {
  return {.backend = collective::BackendKind::kCudaIpc,
          .device = test_device(0),
          .timeout = std::chrono::seconds(60)};
}

/// Joins the world that the environment describes, and makes a group of all ranks on the device.
inline void with_device_group(const collective::GroupOptions& options,
                              const collective::DeviceServices& services,
                              const std::function<void(collective::Group&, Executor&)>& body) {
  const auto executor = make_executor();
  const auto environment = rendezvous::read_environment(rendezvous::process_environment());
  const auto runtime = std::make_shared<Runtime>(*executor, environment.name, LogLevel::kOff);
  rendezvous::MembershipOptions join;
  join.name = environment.name;
  join.rank = environment.rank;
  join.world_size = environment.world_size;
  join.store_address = environment.store_address();
  join.address = "unix:/none";
  join.job = environment.job;
  const auto world = rendezvous::Membership::join(
      *runtime, rendezvous::stream_transports(*executor, rendezvous::load_secret(environment)), join);
  {
    collective::Group group = collective::make_group(runtime, *world, options, services);
    body(group, *executor);
  }
  world->leave(executor->deadline_in(std::chrono::seconds(30)));
}

}  // namespace torchspan::testing
