#pragma once
#include <cstdint>
#include <memory>

#include <torchspan/core/metrics.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

struct LocalOptions {
  std::size_t ring_bytes = std::size_t{1} << 20;      ///< per direction; a power of two, at least 4096
  std::size_t lend_from = std::size_t{16} << 10;      ///< smaller segments go through the ring
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;  ///< lent blocks of the whole transport, in use or not
  /// Blocks unused for this long are returned to the system; 0: never.
  Duration idle_after = std::chrono::seconds(30);
  Metrics* metrics = nullptr;  ///< gets net.local.*; must outlive the transport
};

/// Like make_stream_transport(), but over "unix:/path" peers share memory: a ring per direction, and blocks
/// for large segments that the sender fills and the receiver adopts as Buffers. Falls back to the socket
/// for a peer that does not support this. Adopted Buffers outlive channel, transport and peer; segments are
/// copied instead while more than half of `pool_bytes` is adopted, or with a custom
/// TransportOptions::allocator. An idle side sleeps in wait(). Counts net.local.lent, .adopted, .copied,
/// .inlined (segments) and .pool_bytes. Throws kInvalid for invalid options.
std::unique_ptr<Transport> make_local_transport(Executor& executor, Handler& handler,
                                                TransportOptions options, LocalOptions local = {});

}  // namespace torchspan::net
