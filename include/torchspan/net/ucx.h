#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/core/metrics.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/net/tls.h>

namespace torchspan::net {

/// Who can reach the network that UCX uses. UCX neither authenticates nor encrypts: whoever reaches one of
/// its TCP ports can crash the worker or write its memory.
enum class UcxNetwork : std::uint8_t {
  kRdma,      ///< RDMA devices only; UCX opens no port that TCP reaches
  kIsolated,  ///< TCP as well: this network carries the job's workers and nobody else, which you vouch for
};

struct UcxOptions {
  UcxNetwork network = UcxNetwork::kRdma;  ///< the same on all workers of a job
  std::string devices = {};                ///< as UCX names them, "mlx5_0:1,mlx5_1:1"; empty: all
  /// Segments from so many bytes on come by UCX's rendezvous, straight into the receiver's memory; smaller
  /// ones are copied into the stream. 0: from 64 KiB on with RDMA, never with TCP, where UCX 1.13 aborts the
  /// process when a peer dies in the middle of a rendezvous.
  std::size_t rendezvous_from = 0;
  /// Of the connections that introduce the peers to one another and tell their deaths; `lanes` plays no part.
  TlsOptions tls = {};
  Metrics* metrics = nullptr;  ///< gets net.ucx.*; outlives the transport
};

/// UCX (openucx.org) between hosts with fast fabrics: "ucx:host:port". Peers meet over TLS at that place and
/// prove the secret or a certificate there, as with make_tls_transport(); inside TLS they exchange the
/// addresses of their UCX workers, then messages go through UCX. Heartbeats, deaths and goodbyes stay with
/// TLS. UCX (libucp) is loaded when the first such transport is made. Counts net.ucx.segments (received by
/// rendezvous) and .dropped (UCX messages for channels that are not there, or not any more). Throws
/// kUnsupported when this build has no UCX, when it is not installed, or when it finds no device that
/// `network` allows; kInvalid as make_tls_transport().
///
/// Tested over UCX's TCP on one host only: no RDMA device was at hand. Verify it on yours before you rely on
/// it, with the conformance suite's row "Ucx".
std::unique_ptr<Transport> make_ucx_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              UcxOptions ucx = {});

}  // namespace torchspan::net
