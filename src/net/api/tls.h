#pragma once
#include <memory>

#include <torchspan/detail/net/transport.h>
#include <torchspan/net.h>

namespace torchspan::net {

/// TCP with TLS 1.3 between hosts: "tls:host:port", "tls:10.0.0.1:29500", "tls:[2001:db8::1]:29500".
/// Traffic is encrypted; both sides prove the secret or a certificate in the handshake. A silent host is
/// reported within dead_after + heartbeat. The driving thread must call poll() well within dead_after, or
/// peers consider this side dead. A separate thread resolves names; the destructor waits for a running
/// lookup. Throws kInvalid for invalid options and unusable files.
std::unique_ptr<Transport> make_tls_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              TlsOptions tls = {});

}  // namespace torchspan::net
