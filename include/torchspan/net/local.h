#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include <torchspan/core/metrics.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// What a system may refuse to the local transport.
enum class LocalStep : std::uint8_t {
  kMakeMemory,      ///< a memory file
  kReserveMemory,   ///< its pages
  kMapMemory,       ///< its place in this process, one's own or the peer's
  kPassDescriptor,  ///< sending it to the peer
  kTakeDescriptor,  ///< receiving one from the peer
};

struct LocalOptions {
  std::size_t ring_bytes = std::size_t{1} << 20;      ///< of each direction; a power of two from 4096 on
  std::size_t lend_from = std::size_t{16} << 10;      ///< smaller segments go through the ring
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;  ///< lent blocks of the whole transport, used or not
  /// Blocks that lay unused for so long are given back to the system; zero: never.
  Duration idle_after = std::chrono::seconds(30);
  Metrics* metrics = nullptr;                  ///< gets net.local.*; outlives the transport
  std::function<bool(LocalStep)> refuse = {};  ///< for tests: true makes the system refuse; any thread
};

/// As make_stream_transport(), and over "unix:/path" peers share memory: bytes go through a ring in each
/// direction, large segments through blocks that the sender fills and the receiver adopts as its Buffers. A
/// peer that is no local transport, or cannot share, is served over the socket alone. An idle side sleeps in
/// wait(). Adopted Buffers outlive channel, transport and peer; while more than half of `pool_bytes` are
/// adopted, and with an allocator of one's own in TransportOptions, segments are copied out instead. Counts
/// net.local.lent, .adopted, .copied, .inlined (segments) and .pool_bytes. Throws kInvalid for options that
/// make no sense.
std::unique_ptr<Transport> make_local_transport(Executor& executor, Handler& handler,
                                                TransportOptions options, LocalOptions local = {});

}  // namespace torchspan::net
