#pragma once
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

#include "net/stream/timers.h"
#include "net/stream/token_counter.h"

namespace torchspan::net {

/// What the objects that drive one transport over sockets have in common. The transport owns all of it, and
/// these objects.
struct DriverContext {
  Executor& executor;
  Handler& handler;
  const TransportOptions& options;
  Poller& poller;
  TokenCounter& tokens;
  Timers& timers;
};

}  // namespace torchspan::net
