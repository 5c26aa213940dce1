#pragma once
#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

namespace torchspan::rendezvous {

/// Reads how workers of several hosts reach each other: TORCHSPAN_NETWORK (tls, tcp-isolated, ucx, ucx-isolated),
/// TORCHSPAN_PORT_RANGE, and the files of the certificates. Pure. Throws kInvalid that names the wrong variable.
net::NetworkOptions read_network(const Environment& environment);

}  // namespace torchspan::rendezvous
