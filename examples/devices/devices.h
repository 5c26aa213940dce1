#pragma once
#include <map>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <torchspan/session.h>

namespace CLI {
class App;
}

namespace devices {

/// Adds --device: cpu, cuda (the GPUs of the host in turn, by local rank) or cuda:N.
void add_option(CLI::App& app, std::string& device);

/// Returns the device of the rank with this local rank. Throws Error{kInvalid} if `option` names no device, or one that
/// this machine or this LibTorch does not have.
c10::Device of_rank(const std::string& option, int local_rank);

/// Returns maps by which tensors on the device of this rank arrive on the devices of its peers, for a world on one
/// host whose workers have their default names. Empty for cpu.
std::map<std::string, torchspan::DeviceMap> maps(const std::string& option,
                                                 const torchspan::rendezvous::WorkerEnvironment& environment);

}  // namespace devices
