#pragma once
#include <memory>

#include "net/api/ucx.h"
#include "net/stream/driver_context.h"

namespace torchspan::net {

/// Like make_ucx_transport(), for a transport that contains this one.
std::unique_ptr<PolledTransport> make_ucx_part(Executor& executor, Handler& handler, TransportOptions options,
                                               UcxOptions ucx);

}  // namespace torchspan::net
