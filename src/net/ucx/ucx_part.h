#pragma once
#include <memory>

#include <torchspan/net/ucx.h>

#include "net/polled.h"

namespace torchspan::net {

/// As make_ucx_transport(), for a transport that has it as a part.
std::unique_ptr<PolledTransport> make_ucx_part(Executor& executor, Handler& handler, TransportOptions options,
                                               UcxOptions ucx);

}  // namespace torchspan::net
