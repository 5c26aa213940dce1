#pragma once
#include <memory>

namespace torchspan::rpc {

class DeviceMemory;
class RpcAgent;

/// Adds the handlers of calls, creations, fetches, operators, scripts and the reference protocol.
void install_handlers(RpcAgent& agent);
/// Adds those of memory on devices that workers of one host share; if there is none, such messages are refused.
void install_device_memory(RpcAgent& agent, const std::shared_ptr<DeviceMemory>& memory);

}  // namespace torchspan::rpc
