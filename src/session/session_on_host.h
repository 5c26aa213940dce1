#pragma once
#include <string>

#include <torchspan/session.h>

namespace torchspan {

/// Makes a session whose worker reports the host `host_mark` instead of this boot of this machine, so that
/// tests can simulate several hosts on one machine. Otherwise as the constructor of Session.
Session make_session_on_host(const std::string& host_mark, WorkerOptions options,
                             FunctionTable functions = {});

}  // namespace torchspan
