#pragma once
#include <memory>
#include <openssl/ssl.h>
#include <string>

#include "net/api/tls.h"
#include "net/handshake.h"
#include "net/tls/socket_buffers.h"

namespace torchspan::net {

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
