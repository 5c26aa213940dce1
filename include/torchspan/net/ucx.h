#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/core/metrics.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/net/tls.h>

namespace torchspan::net {

/// Which network UCX may use. UCX neither authenticates nor encrypts: any host that reaches one of its TCP
/// ports can crash the worker or write its memory.
enum class UcxNetwork : std::uint8_t {
  kRdma,      ///< RDMA devices only; UCX opens no TCP port
  kIsolated,  ///< also TCP: you assert that only the job's workers reach this network
};

struct UcxOptions {
  UcxNetwork network = UcxNetwork::kRdma;  ///< equal on all workers of a job
  std::string devices = {};                ///< UCX names, "mlx5_0:1,mlx5_1:1"; empty: all
  /// Minimum size in bytes of segments sent by UCX rendezvous, directly into the receiver's memory; smaller
  /// ones are copied. 0: 64 KiB with RDMA and never with TCP, where UCX 1.13 aborts the process if a peer
  /// dies during a rendezvous.
  std::size_t rendezvous_from = 0;
  /// TLS connections that authenticate the peers and detect their death; `lanes` is ignored.
  TlsOptions tls = {};
  Metrics* metrics = nullptr;  ///< gets net.ucx.*; must outlive the transport
};

/// UCX (openucx.org) between hosts with fast fabrics: "ucx:host:port". Peers authenticate over TLS as in
/// make_tls_transport(); messages go through UCX, heartbeats, deaths and closes through TLS. Loads libucp
/// at the first use. Counts net.ucx.segments (received by rendezvous) and .dropped (messages for unknown
/// channels). Throws kUnsupported without UCX in this build, an installed UCX, or a device that `network`
/// allows; kInvalid as make_tls_transport(). Tested over UCX's TCP on one host only: run the conformance
/// suite's "Ucx" row on your RDMA devices before relying on it.
std::unique_ptr<Transport> make_ucx_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              UcxOptions ucx = {});

}  // namespace torchspan::net
