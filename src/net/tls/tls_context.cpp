#include "net/tls/tls_context.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cstdint>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/x509v3.h>
#include <string_view>
#include <sys/socket.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "net/tls/tls_handshake.h"

namespace torchspan::net {
namespace {

constexpr long kWideBuffer = 4 << 20;

/// The last number in a file of the system's settings; 0 if it cannot be read.
long last_number_in(const char* path) {
  std::ifstream file(path);
  long number = 0;
  for (long next; file >> next;) number = next;
  return number;
}

/// `most`: the file with the largest size that a program may set, which the kernel doubles; `adjusted`: the
/// file with the largest size that the kernel's adjustment reaches, which ends when a program sets a size.
int wide_size(const char* most, const char* adjusted) {
  const long size = std::min(kWideBuffer, last_number_in(most));
  return 2 * size > last_number_in(adjusted) ? static_cast<int>(size) : 0;
}

}  // namespace

SocketBuffers::SocketBuffers()
    : send_(wide_size("/proc/sys/net/core/wmem_max", "/proc/sys/net/ipv4/tcp_wmem")),
      receive_(wide_size("/proc/sys/net/core/rmem_max", "/proc/sys/net/ipv4/tcp_rmem")) {}

void SocketBuffers::widen(int socket) const {
  if (send_ != 0) ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &send_, sizeof send_);
  if (receive_ != 0) ::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &receive_, sizeof receive_);
}

void derive_key(BytesView secret, std::string_view label, std::span<unsigned char> key) {
  const std::unique_ptr<EVP_KDF, Release<EVP_KDF_free>> algorithm(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const std::unique_ptr<EVP_KDF_CTX, Release<EVP_KDF_CTX_free>> context(EVP_KDF_CTX_new(algorithm.get()));
  char hash[] = "SHA256";
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, hash, 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<std::byte*>(secret.data()),
                                        secret.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<char*>(label.data()), label.size()),
      OSSL_PARAM_construct_end()};
  if (context == nullptr || EVP_KDF_derive(context.get(), key.data(), key.size(), parameters) != 1) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("OpenSSL cannot derive a key with HKDF-SHA-256: {}", tls_reason()));
  }
}

namespace {

constexpr std::string_view kKeyLabel = "torchspan tls 1.3 external psk, version 1";
constexpr std::string_view kIdentity = "torchspan";
/// In seconds: 68 years. OpenSSL takes the key for a session to resume, which by default expires after 304 s.
constexpr long kKeyLifetime = std::numeric_limits<std::int32_t>::max();
constexpr long kMostCertificateBytes = 32 << 10;
/// The first suite has the hash to which the pre-shared key is bound; the second one is for processors
/// without AES instructions.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::array<unsigned char, 2> kFirstCipher = {0x13, 0x01};

[[noreturn]] void throw_openssl(const std::string& what) {
  throw Error(ErrorKind::kUnsupported, fmt::format("OpenSSL {}: {}", what, tls_reason()));
}

/// Copies the key in the SSL_CTX's application data: OpenSSL changes the key object of a connection that
/// fails.
int lend_key(SSL* ssl, SSL_SESSION** session) {
  *session = SSL_SESSION_dup(static_cast<SSL_SESSION*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl))));
  return *session != nullptr;
}

int key_for_dialing(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* size,
                    SSL_SESSION** session) {
  *session = nullptr;
  if (digest != nullptr && EVP_MD_is_a(digest, "SHA256") == 0) return 1;
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *size = kIdentity.size();
  return lend_key(ssl, session);
}

int key_for_listening(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session) {
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(identity), size) != kIdentity) return 1;
  return lend_key(ssl, session);
}

std::unique_ptr<BIO_METHOD, Release<BIO_meth_free>> make_method() {
  std::unique_ptr<BIO_METHOD, Release<BIO_meth_free>> method(
      BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "torchspan"));
  if (method == nullptr) throw_openssl("cannot allocate a BIO");
  BIO_meth_set_read(method.get(), [](BIO* bio, char* to, int size) {
    return static_cast<TlsHandshake*>(BIO_get_data(bio))->pull(bio, to, size);
  });
  BIO_meth_set_write(method.get(), [](BIO* bio, const char* from, int size) {
    return static_cast<TlsHandshake*>(BIO_get_data(bio))->push(from, size);
  });
  BIO_meth_set_ctrl(method.get(),
                    [](BIO*, int command, long, void*) -> long { return command == BIO_CTRL_FLUSH; });
  return method;
}

}  // namespace

std::string tls_reason() {
  const unsigned long code = ERR_peek_error();
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : code != 0 ? fmt::format("error {:#x}", code) : "no reason given";
}

TlsContext::TlsContext(const Secret& secret, const TlsOptions& options)
    : by_certificate_(!options.certificate_file.empty()),
      check_names_(options.check_names),
      network_(options.network),
      method_(make_method()),
      dialer_(make_context(Role::kDialer)),
      listener_(make_context(Role::kListener)) {
  const bool files[] = {options.certificate_file.empty(), options.key_file.empty(),
                        options.authority_file.empty()};
  if (files[0] != files[1] || files[1] != files[2]) {
    throw_invalid("certificates need all three of TlsOptions::certificate_file, key_file and authority_file");
  }
  if (check_names_ && !by_certificate_) {
    throw_invalid("TlsOptions::check_names needs certificates: a shared secret carries no name");
  }
  if (!by_certificate_ && secret.empty()) {
    throw_invalid(
        "a transport between hosts needs a cluster secret (set TransportOptions::secret, e.g. from "
        "Secret::from_file(path)) or certificates (TlsOptions)");
  }
  if (!by_certificate_) key_ = make_key(secret, dialer_.get());
  for (const auto& [context, role] :
       {std::pair(dialer_.get(), Role::kDialer), std::pair(listener_.get(), Role::kListener)}) {
    by_certificate_ ? use_certificates(context, options) : use_secret(context, role);
  }
}

TlsContext::~TlsContext() = default;

TlsContext::ContextPtr TlsContext::make_context(Role role) {
  ContextPtr owned(SSL_CTX_new(role == Role::kDialer ? TLS_client_method() : TLS_server_method()));
  SSL_CTX* context = owned.get();
  if (context == nullptr) throw_openssl("cannot be used here");
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context, kCiphers) != 1 ||
      SSL_CTX_set1_groups_list(context, "X25519:P-256") != 1 || SSL_CTX_set_num_tickets(context, 0) != 1) {
    throw_openssl("cannot use TLS 1.3 here");
  }
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_max_cert_list(context, kMostCertificateBytes);
  return owned;
}

TlsContext::SessionPtr TlsContext::make_key(const Secret& secret, SSL_CTX* context) const {
  KeySecret key;
  derive_key(secret.bytes(), kKeyLabel, key);
  const SslPtr any(SSL_new(context));
  const SSL_CIPHER* cipher = any ? SSL_CIPHER_find(any.get(), kFirstCipher.data()) : nullptr;
  SessionPtr session(SSL_SESSION_new());
  if (cipher == nullptr || session == nullptr ||
      SSL_SESSION_set1_master_key(session.get(), key.data(), key.size()) != 1 ||
      SSL_SESSION_set_cipher(session.get(), cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) != 1 ||
      SSL_SESSION_set_timeout(session.get(), kKeyLifetime) != 1) {
    throw_openssl("cannot use a pre-shared key");
  }
  return session;
}

void TlsContext::use_secret(SSL_CTX* context, Role role) {
  SSL_CTX_set_app_data(context, key_.get());
  if (role == Role::kDialer) {
    // No authority is trusted: a listener that offers a certificate instead of the key is refused.
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
    SSL_CTX_set_psk_use_session_callback(context, key_for_dialing);
  } else {
    SSL_CTX_set_psk_find_session_callback(context, key_for_listening);
  }
}

void TlsContext::use_certificates(SSL_CTX* context, const TlsOptions& options) const {
  ERR_clear_error();
  const auto check = [](int done, const char* what, const std::string& file) {
    if (done == 1) return;
    throw_invalid("{} file '{}' cannot be used ({}): give a PEM file of this worker", what, file,
                  tls_reason());
  };
  check(SSL_CTX_use_certificate_chain_file(context, options.certificate_file.c_str()), "certificate",
        options.certificate_file);
  check(SSL_CTX_use_PrivateKey_file(context, options.key_file.c_str(), SSL_FILETYPE_PEM), "key",
        options.key_file);
  check(SSL_CTX_check_private_key(context), "key", options.key_file);
  check(SSL_CTX_load_verify_file(context, options.authority_file.c_str()), "authority",
        options.authority_file);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
}

SslPtr TlsContext::make_connection(Role role, const std::string& host) const {
  SslPtr ssl(SSL_new(role == Role::kDialer ? dialer_.get() : listener_.get()));
  if (ssl == nullptr) throw Error(ErrorKind::kOverloaded, "no memory left for a TLS connection");
  role == Role::kDialer ? SSL_set_connect_state(ssl.get()) : SSL_set_accept_state(ssl.get());
  if (role == Role::kDialer && check_names_) {
    X509_VERIFY_PARAM* wanted = SSL_get0_param(ssl.get());
    const bool is_address = X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) == 1;
    if (!is_address && X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size()) != 1) {
      throw_invalid("'{}' is not a host name that a certificate can contain", host);
    }
  }
  return ssl;
}

}  // namespace torchspan::net
