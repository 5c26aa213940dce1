#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <sys/uio.h>
#include <vector>

#include <torchspan/core/error.h>

#include "net/tls/byte_stream.h"
#include "net/tls/tls_context.h"

namespace torchspan::net {

/// The TLS 1.3 handshake over a non-blocking socket, which another object owns, and the first bytes after it.
/// Until the peer has proved itself, accepts few bytes from it and uses little memory. Not thread-safe.
class TlsHandshake {
 public:
  struct Start {
    Role role;
    std::string peer;  ///< name of the peer in errors
    std::string host;  ///< that the certificate must name, if that is checked
  };
  TlsHandshake(const std::shared_ptr<const TlsContext>& context, int socket, Start start);

  /// Continues the handshake; returns true once it is done. Throws kDenied, kUnsupported, kInvalid or
  /// kDisconnected, after the TLS alert to the peer.
  bool shake_hands();
  /// As ByteStream::read(); throws as shake_hands().
  ByteStream::Got read(std::span<const iovec> places);
  /// Accepts all bytes and sends what the socket has room for; false if the socket is broken.
  bool write(std::span<const iovec> places);
  bool flush();
  std::size_t unsent() const { return out_.size() - sent_; }

  /// For what follows the handshake: the cipher, a secret for each direction that only both sides know, and
  /// the bytes that wait.
  const EVP_CIPHER* cipher() const;
  KeySecret secret_of(Role sender) const;
  std::vector<char> take_unsent();
  std::vector<char> take_ahead();

  /// For the BIO.
  int pull(BIO* bio, char* to, int size);
  int push(const char* from, int size);

 private:
  void refill();
  [[noreturn]] void fail();
  void check_proof();

  const std::shared_ptr<const TlsContext> context_;
  const Start start_;
  const int socket_;
  SslPtr ssl_;
  std::vector<char> ahead_;  ///< memory for bytes received before OpenSSL asked for them
  std::size_t ahead_at_ = 0;
  std::size_t ahead_end_ = 0;
  std::size_t unproven_ = 0;  ///< bytes received before the peer proved itself
  bool proved_ = false;       ///< the peer
  bool drained_ = false;      ///< the last read returned fewer bytes than it asked for
  bool flooded_ = false;      ///< an unauthenticated peer sent too much
  ByteStream::Got received_;  ///< what all reads from the socket met
  std::vector<char> out_;     ///< bytes from sent_ on wait for the socket
  std::size_t sent_ = 0;
};

}  // namespace torchspan::net
