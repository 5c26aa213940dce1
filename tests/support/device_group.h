#pragma once
// A rank of a group on the test devices, in a process that ProcessWorld started.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>

#include <torchspan/collective.h>
#include <torchspan/core/log.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "collective/api/device_services.h"
#include "collective/nccl/nccl_library.h"
#include "rendezvous/api/environment.h"
#include "tests/support/fake_nccl/fake_nccl.h"
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

/// NCCL for groups on the test devices: the fake one on stand-ins, of which each process then has its own, and the
/// installed one on CUDA devices.
inline collective::DeviceServices nccl_services() {
  if (on_cuda()) return {.runtime = test_runtime()};
  return {.runtime = std::make_shared<StandInRuntime>(/*shared=*/false), .nccl_library = fake_nccl()};
}
inline collective::GroupOptions nccl_options() {
  return {.backend = collective::BackendKind::kNccl,
          .device = test_device(0),
          .timeout = std::chrono::seconds(60)};
}

/// Why processes cannot have a group over NCCL here; empty if they can. On CUDA devices they need one each, or a release
/// of NCCL that lets them share one.
inline std::string nccl_missing(int processes) {
  if (!on_cuda() || test_device_count() >= processes) return {};
  try {
    if (collective::nccl::may_share_gpu(*collective::nccl::NcclLibrary::load())) return {};
  } catch (const Error& error) {
    return error.message();
  }
  return "the test needs " + std::to_string(processes) + " GPUs, or NCCL 2.30 and " +
         collective::nccl::kSharedGpuVariable + "=1 for processes that share one";
}

/// Variables with which the first CUDA device of rank `rank` is another one than that of the other ranks, if there are
/// enough of them.
inline std::map<std::string, std::string> own_gpu(int rank, int processes) {
  if (!on_cuda() || test_device_count() < processes) return {};
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string gpu = std::to_string(rank);
  std::istringstream listed(visible == nullptr ? "" : visible);
  for (int i = 0; visible != nullptr && i <= rank; ++i) std::getline(listed, gpu, ',');
  return {{"CUDA_VISIBLE_DEVICES", gpu}};
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

/// Ends a rank of a broken world of which two are left. Rank 0 serves the store, so it is the last one.
[[noreturn]] inline void end_rank(int rank, Executor& executor) {
  const std::string other_ended = std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/other_ended";
  if (rank != 0) std::ofstream(other_ended) << rank;
  const Deadline until = executor.deadline_in(std::chrono::seconds(30));
  while (!std::filesystem::exists(other_ended) && !until.passed(executor.now()))
    executor.sleep(std::chrono::milliseconds(5));
  ::_exit(0);
}

}  // namespace torchspan::testing
