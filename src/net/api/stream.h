#pragma once
#include <memory>

#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// Sockets of one host: "unix:/path" (peers of the same user only) and "tcp:127.0.0.1:port" (loopback only:
/// plain TCP is not offered between hosts). Handshake: both sides prove the secret with HMAC-SHA-256 over
/// both nonces.
std::unique_ptr<Transport> make_stream_transport(Executor& executor, Handler& handler,
                                                 TransportOptions options);

}  // namespace torchspan::net
