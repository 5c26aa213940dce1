#pragma once
#include <memory>

#include <torchspan/net/local.h>

#include "net/stream/stream_transport.h"

namespace torchspan::net {

/// As make_local_transport(), for a transport that has it as a part.
std::unique_ptr<StreamTransport> make_local_part(Executor& executor, Handler& handler,
                                                 TransportOptions options, LocalOptions local);

}  // namespace torchspan::net
