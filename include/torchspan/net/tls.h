#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// What only connections between hosts have. The same on all workers of a job.
struct TlsOptions {
  /// Further connections of each channel that carry the pieces of messages from 1 MiB on; 0 to 16. A channel
  /// works with fewer if some cannot be made.
  std::uint32_t lanes = 2;
  Duration heartbeat = std::chrono::milliseconds(200);  ///< how often an idle channel shows that it lives
  Duration dead_after = std::chrono::seconds(5);        ///< silence that ends a channel with kDisconnected

  /// PEM files. With them both sides must show a certificate that the authority signed, and
  /// TransportOptions::secret plays no part; without them both prove the secret.
  std::string certificate_file = {};
  std::string key_file = {};
  std::string authority_file = {};
  /// With certificates: who dials a host also checks that the certificate is made out to it. Otherwise every
  /// holder of a certificate of the authority may stand for every other.
  bool check_names = false;
};

/// TCP with TLS 1.3 between hosts: "tls:host:port", "tls:10.0.0.1:29500", "tls:[2001:db8::1]:29500".
/// Everything is encrypted; both sides prove the secret or a certificate within the TLS handshake. A host
/// that disappears without a word is reported within dead_after + heartbeat. Whoever drives the transport
/// must come back to poll() well within dead_after, or its peers take it for dead. Names are looked up on a
/// thread of its own; destroying the transport waits for a look-up that is under way. Throws kInvalid for
/// options that cannot work and files that cannot be used.
std::unique_ptr<Transport> make_tls_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              TlsOptions tls = {});

}  // namespace torchspan::net
