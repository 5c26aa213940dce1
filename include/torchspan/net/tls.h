#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// Options of connections between hosts; equal on all workers of a job.
struct TlsOptions {
  /// Extra connections per channel that carry parts of messages of at least 1 MiB; 0 to 16. A channel works
  /// with fewer if some cannot be opened.
  std::uint32_t lanes = 2;
  Duration heartbeat = std::chrono::milliseconds(200);  ///< interval of heartbeats on an idle channel
  Duration dead_after = std::chrono::seconds(5);        ///< silence that ends a channel with kDisconnected

  /// PEM files. If set, both sides must present a certificate signed by the authority, and
  /// TransportOptions::secret is not used; otherwise both sides prove the secret.
  std::string certificate_file = {};
  std::string key_file = {};
  std::string authority_file = {};
  /// With certificates: the dialing side also verifies that the certificate names the dialed host. False:
  /// any holder of a certificate from the authority can impersonate another.
  bool check_names = false;
};

/// TCP with TLS 1.3 between hosts: "tls:host:port", "tls:10.0.0.1:29500", "tls:[2001:db8::1]:29500".
/// Traffic is encrypted; both sides prove the secret or a certificate in the handshake. A silent host is
/// reported within dead_after + heartbeat. The driving thread must call poll() well within dead_after, or
/// peers consider this side dead. A separate thread resolves names; the destructor waits for a running
/// lookup. Throws kInvalid for invalid options and unusable files.
std::unique_ptr<Transport> make_tls_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              TlsOptions tls = {});

}  // namespace torchspan::net
