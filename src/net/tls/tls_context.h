#pragma once
#include <array>
#include <memory>
#include <openssl/ssl.h>
#include <span>
#include <string>
#include <string_view>

#include <torchspan/core/bytes.h>

#include "net/api/tls.h"
#include "net/handshake.h"

namespace torchspan::net {

/// How large the kernel's buffers of TCP connections become for large messages: as large as the system allows,
/// where that is more than its own adjustment would reach. Reads the system's settings once.
class SocketBuffers {
 public:
  SocketBuffers();
  /// Only for peers that proved themselves, because the kernel's memory is limited.
  void widen(int socket) const;

 private:
  int send_;  ///< bytes; 0: the system's adjustment
  int receive_;
};

/// Bytes from which keys are derived.
using KeySecret = std::array<unsigned char, 32>;

/// Fills `key` with HKDF-SHA-256 (RFC 5869, without salt) of `secret` for the use that `label` names. Throws
/// kUnsupported if OpenSSL lacks it.
void derive_key(BytesView secret, std::string_view label, std::span<unsigned char> key);

/// Releases an object with OpenSSL's function for its type.
template <auto kRelease>
struct Release {
  template <class T>
  void operator()(T* object) const {
    kRelease(object);
  }
};
using SslPtr = std::unique_ptr<SSL, Release<SSL_free>>;

/// Shared by all connections of a transport: TLS 1.3 only, no resumption, no early data, and how both sides
/// prove their identity. Thread-safe.
class TlsContext {
 public:
  /// Throws kInvalid for a missing secret and for certificate files that cannot be used.
  TlsContext(const Secret& secret, const TlsOptions& options);
  ~TlsContext();

  /// A connection without a BIO. `host` is checked against the peer's certificate if the options ask for it.
  SslPtr make_connection(Role role, const std::string& host) const;
  /// A BIO that calls TlsHandshake; see there.
  BIO_METHOD* method() const { return method_.get(); }
  bool by_certificate() const { return by_certificate_; }
  /// Whether connections are encrypted after the handshake.
  TcpNetwork network() const { return network_; }
  const SocketBuffers& buffers() const { return buffers_; }

 private:
  using ContextPtr = std::unique_ptr<SSL_CTX, Release<SSL_CTX_free>>;
  using SessionPtr = std::unique_ptr<SSL_SESSION, Release<SSL_SESSION_free>>;
  using MethodPtr = std::unique_ptr<BIO_METHOD, Release<BIO_meth_free>>;

  ContextPtr make_context(Role role);
  void use_secret(SSL_CTX* context, Role role);
  void use_certificates(SSL_CTX* context, const TlsOptions& options) const;
  SessionPtr make_key(const Secret& secret, SSL_CTX* context) const;

  const bool by_certificate_;
  const bool check_names_;
  const TcpNetwork network_;
  const SocketBuffers buffers_;
  MethodPtr method_;
  ContextPtr dialer_;
  ContextPtr listener_;
  SessionPtr key_;  ///< the pre-shared key, in OpenSSL's form
};

/// The reason in OpenSSL's error queue, as text.
std::string tls_reason();

}  // namespace torchspan::net
