#pragma once
#include <memory>

#include "net/api/local.h"
#include "net/local/ring.h"
#include "net/stream/stream_transport.h"

namespace torchspan::net {

struct LocalSetup {
  LocalOptions options = {};
  LocalFaults faults = {};
};

/// Like make_local_transport(), for a transport that contains this one, and for tests that make calls fail.
std::unique_ptr<StreamTransport> make_local_part(Executor& executor, Handler& handler,
                                                 TransportOptions options, LocalSetup setup);

}  // namespace torchspan::net
