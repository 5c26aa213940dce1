#pragma once

namespace torchspan::rpc {

class RpcAgent;

/// Adds the handlers of calls, creations, fetches, operators, scripts and the reference protocol.
void install_handlers(RpcAgent& agent);

}  // namespace torchspan::rpc
