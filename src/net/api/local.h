#pragma once
#include <memory>

#include <torchspan/detail/net/transport.h>
#include <torchspan/net.h>

namespace torchspan::net {

/// Like make_stream_transport(), but over "unix:/path" peers share memory: a ring per direction, and blocks
/// for large segments that the sender fills and the receiver adopts as Buffers. Falls back to the socket
/// for a peer that does not support this. Adopted Buffers outlive channel, transport and peer; segments are
/// copied instead while more than half of `pool_bytes` is adopted, or with a custom
/// TransportOptions::allocator. An idle side sleeps in wait(). Counts net.local.lent, .adopted, .copied,
/// .inlined (segments) and .pool_bytes. Throws kInvalid for invalid options.
std::unique_ptr<Transport> make_local_transport(Executor& executor, Handler& handler,
                                                TransportOptions options, LocalOptions local = {});

}  // namespace torchspan::net
