#pragma once
#include <memory>
#include <string>
#include <utility>

#include <torchspan/detail/core/protocol.h>
#include <torchspan/session.h>

namespace torchspan {

/// For tests: what a worker announces instead of the truth.
struct SessionDisguise {
  std::string host_mark = {};  ///< the host; empty: this boot of this machine
  ProtocolRange wire = kWireProtocol;
  ProtocolRange store = kStoreProtocol;
};
/// `extensions`: as detail::with_defaults() returns them.
Session make_session(const SessionDisguise& disguise, WorkerOptions options, FunctionTable functions,
                     Extensions extensions);

/// Makes a session whose worker reports the host `host_mark` instead of this boot of this machine, so that
/// tests can simulate several hosts on one machine. Otherwise as the constructor of Session.
inline Session make_session_on_host(const std::string& host_mark, WorkerOptions options,
                                    FunctionTable functions = {}) {
  return make_session({.host_mark = host_mark}, std::move(options), std::move(functions),
                      detail::with_defaults({}));
}

}  // namespace torchspan
