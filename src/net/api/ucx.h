#pragma once
#include <memory>

#include <torchspan/detail/net/transport.h>
#include <torchspan/net.h>

namespace torchspan::net {

/// UCX (openucx.org) between hosts with fast fabrics: "ucx:host:port". Peers authenticate over TLS as in
/// make_tls_transport(); messages go through UCX, heartbeats, deaths and closes through TLS. Loads libucp
/// at the first use. Counts net.ucx.segments (received by rendezvous) and .dropped (messages for unknown
/// channels). Throws kUnsupported without UCX in this build, an installed UCX, or a device that `network`
/// allows; kInvalid as make_tls_transport(). Tested over UCX's TCP on one host only: run the conformance
/// suite's "Ucx" row on your RDMA devices before relying on it.
std::unique_ptr<Transport> make_ucx_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              UcxOptions ucx = {});

}  // namespace torchspan::net
