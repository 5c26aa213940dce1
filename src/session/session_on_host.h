#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/protocol.h>
#include <torchspan/session.h>

namespace torchspan {

/// For tests: what a worker announces instead of the truth.
struct SessionDisguise {
  std::string host_mark = {};  ///< the host; empty: this boot of this machine
  ProtocolRange wire = kWireProtocol;
  ProtocolRange store = kStoreProtocol;
};
Session make_session(const SessionDisguise& disguise, WorkerOptions options, FunctionTable functions,
                     std::vector<std::unique_ptr<rpc::Extension>> extensions);

/// Makes a session whose worker reports the host `host_mark` instead of this boot of this machine, so that
/// tests can simulate several hosts on one machine. Otherwise as the constructor of Session.
Session make_session_on_host(const std::string& host_mark, WorkerOptions options,
                             FunctionTable functions = {});

}  // namespace torchspan
