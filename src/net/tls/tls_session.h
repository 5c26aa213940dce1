#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "net/tls/byte_stream.h"
#include "net/tls/tls_context.h"
#include "net/tls/tls_handshake.h"

namespace torchspan::net {

/// One connection: a TLS handshake over a non-blocking socket, which it owns, then the byte stream that
/// TlsOptions::network asks for. Until trust() is called, only the driver uses it; then any thread writes, and
/// one reads.
class TlsSession {
 public:
  using Got = ByteStream::Got;
  struct Start {
    Role role;
    std::string peer;  ///< name of the peer in errors
    std::string host;  ///< that the certificate must name, if that is checked
    /// AES-128-GCM may protect about 2^38 bytes under one key (RFC 8446, 5.5); both sides change it long
    /// before.
    std::uint64_t bytes_per_key = std::uint64_t{64} << 30;
  };
  TlsSession(std::shared_ptr<const TlsContext> context, Descriptor socket, Start start);
  ~TlsSession();

  int socket() const { return socket_.get(); }
  /// Continues the handshake; returns true once it is done. Throws kDenied, kUnsupported, kInvalid or
  /// kDisconnected, after the TLS alert to the peer.
  bool shake_hands();
  /// Both sides have sent and received their greetings, the last bytes inside TLS: starts the byte stream.
  void trust();

  /// As ByteStream::read(); before trust() also as shake_hands(). The stream has ended after close().
  Got read(std::span<const iovec> places);
  /// As ByteStream; before trust(), accepts all bytes.
  ssize_t write(std::span<const iovec> places);
  bool flush();
  std::size_t unsent() const { return stream_ ? stream_->unsent() : handshake_->unsent(); }
  std::string broken() const;
  std::uint64_t key_renewals() const { return stream_ ? stream_->key_renewals() : 0; }

  /// Ends the connection; drops bytes that the peer has not received yet if `at_once`. The descriptor stays
  /// open until the session is destroyed.
  void close(bool at_once);

 private:
  const std::shared_ptr<const TlsContext> context_;
  const Start start_;
  const Descriptor socket_;
  std::unique_ptr<TlsHandshake> handshake_;  ///< until trust()
  std::unique_ptr<ByteStream> stream_;       ///< from then on
  std::atomic<bool> closed_{false};
};

}  // namespace torchspan::net
