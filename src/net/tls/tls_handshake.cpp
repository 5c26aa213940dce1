#include "net/tls/tls_handshake.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <string>
#include <string_view>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "net/channel_errors.h"
#include "net/tls/byte_stream.h"
#include "net/tls/tls_context.h"

namespace torchspan::net {
namespace {

enum class Cause { kTheyDenied, kWeDenied, kVersion, kGarbage };

Cause cause_of_alert(int alert) {
  switch (alert) {
    case SSL_AD_PROTOCOL_VERSION:
      return Cause::kVersion;
    case SSL_AD_HANDSHAKE_FAILURE:
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_CERTIFICATE_EXPIRED:
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_ILLEGAL_PARAMETER:
    case SSL_AD_UNKNOWN_CA:
    case SSL_AD_ACCESS_DENIED:
    case SSL_AD_DECRYPT_ERROR:
    case SSL_AD_UNKNOWN_PSK_IDENTITY:
    case TLS13_AD_CERTIFICATE_REQUIRED:
      return Cause::kTheyDenied;
    default:
      return Cause::kGarbage;
  }
}

Cause cause_of(int reason) {
  if (reason > SSL_AD_REASON_OFFSET && reason <= SSL_AD_REASON_OFFSET + 255) {
    return cause_of_alert(reason - SSL_AD_REASON_OFFSET);
  }
  switch (reason) {
    case SSL_R_BINDER_DOES_NOT_VERIFY:
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
    case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_BAD_SIGNATURE:
      return Cause::kWeDenied;
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_VERSION_TOO_LOW:
    case SSL_R_NO_PROTOCOLS_AVAILABLE:
      return Cause::kVersion;
    default:
      return Cause::kGarbage;
  }
}

constexpr const char* kSecretCure = "give both the same secret file (TORCHSPAN_SECRET_FILE)";
constexpr const char* kCertificateCure =
    "give both a certificate of one authority (TlsOptions) that is valid now: compare the clocks of the "
    "hosts "
    "(date -u) with its dates (openssl x509 -noout -dates -in FILE)";

/// The error of a failed TLS handshake, from OpenSSL's error queue and the result of the peer's certificate:
/// kDenied (one side did not prove itself), kUnsupported (no TLS 1.3) or kInvalid (no TLS at all).
Error handshake_failure(const std::string& peer, bool by_certificate, long certificate_result) {
  std::string detail = tls_reason();
  const char* cure = by_certificate ? kCertificateCure : kSecretCure;
  switch (cause_of(ERR_GET_REASON(ERR_peek_error()))) {
    case Cause::kTheyDenied:
      return Error(ErrorKind::kDenied,
                   fmt::format("'{}' refused this side's proof ({}); {}", peer, detail, cure));
    case Cause::kWeDenied:
      if (certificate_result != X509_V_OK)
        detail += std::string(": ") + X509_verify_cert_error_string(certificate_result);
      return Error(ErrorKind::kDenied, fmt::format("'{}' did not prove that it belongs to this job ({}); {}",
                                                   peer, detail, cure));
    case Cause::kVersion:
      return Error(ErrorKind::kUnsupported,
                   fmt::format("'{}' does not speak TLS 1.3 ({}): run the same TorchSpan on all workers",
                               peer, detail));
    case Cause::kGarbage:
      break;
  }
  return Error(
      ErrorKind::kInvalid,
      fmt::format("'{}' does not speak TorchSpan's protocol ({}): is the address right?", peer, detail));
}

constexpr std::size_t kAheadBytes = 4 << 10;
constexpr std::size_t kUnauthenticatedBytes = 64 << 10;
/// Labels of exported keys (RFC 8446, 7.5), by the side that sends with them.
constexpr std::string_view kDialerLabel = "EXPORTER-torchspan-records-of-dialer";
constexpr std::string_view kListenerLabel = "EXPORTER-torchspan-records-of-listener";

}  // namespace

TlsHandshake::TlsHandshake(const std::shared_ptr<const TlsContext>& context, int socket, Start start)
    : context_(context),
      start_(std::move(start)),
      socket_(socket),
      ssl_(context_->make_connection(start_.role, start_.host)),
      ahead_(kAheadBytes) {
  BIO* bio = BIO_new(context_->method());
  if (bio == nullptr) throw Error(ErrorKind::kOverloaded, "no memory left for a TLS connection");
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
}

int TlsHandshake::pull(BIO* bio, char* to, int size) {
  BIO_clear_retry_flags(bio);
  if (ahead_at_ == ahead_end_) refill();
  if (ahead_at_ == ahead_end_) {
    if (received_.ended) return 0;
    if (received_.broken == 0 && !flooded_) BIO_set_retry_read(bio);
    return -1;
  }
  const std::size_t taken = std::min<std::size_t>(static_cast<std::size_t>(size), ahead_end_ - ahead_at_);
  std::memcpy(to, ahead_.data() + ahead_at_, taken);
  ahead_at_ += taken;
  return static_cast<int>(taken);
}

void TlsHandshake::refill() {
  if (drained_ || received_.ended || received_.broken != 0) return;
  const std::size_t room =
      proved_ ? ahead_.size() : std::min(ahead_.size(), kUnauthenticatedBytes - unproven_);
  flooded_ = room == 0;
  if (flooded_) return;
  const iovec place{ahead_.data(), room};
  const ByteStream::Got got = receive_now(socket_, std::span(&place, 1));
  received_.ended = got.ended;
  received_.broken = got.broken;
  received_.heard |= got.heard;
  drained_ = got.size < room;
  ahead_at_ = 0;
  ahead_end_ = got.size;
  if (!proved_) unproven_ += got.size;
}

int TlsHandshake::push(const char* from, int size) {
  out_.insert(out_.end(), from, from + size);
  return size;
}

bool TlsHandshake::flush() {
  while (sent_ < out_.size()) {
    const iovec place{out_.data() + sent_, out_.size() - sent_};
    const ssize_t sent = send_now(socket_, std::span(&place, 1));
    if (sent < 0) return false;
    if (sent == 0) return true;
    sent_ += static_cast<std::size_t>(sent);
  }
  out_.clear();
  sent_ = 0;
  return true;
}

bool TlsHandshake::shake_hands() {
  drained_ = false;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  flush();
  if (result == 1) {
    check_proof();
    proved_ = true;
    return true;
  }
  const bool waiting = SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ;
  if (!waiting || received_.ended || received_.broken != 0) fail();
  return false;
}

void TlsHandshake::check_proof() {
  // Only the pre-shared key counts as a resumed session here. Without it, only a verified certificate does.
  const bool proven = context_->by_certificate() ? SSL_get0_peer_certificate(ssl_.get()) != nullptr &&
                                                       SSL_get_verify_result(ssl_.get()) == X509_V_OK
                                                 : SSL_session_reused(ssl_.get()) == 1;
  if (SSL_version(ssl_.get()) != TLS1_3_VERSION || !proven) {
    throw Error(ErrorKind::kDenied,
                fmt::format("'{}' did not prove that it belongs to this job", start_.peer));
  }
}

void TlsHandshake::fail() {
  if (flooded_) {
    throw_invalid("'{}' sent more than {} bytes before it proved anything", start_.peer,
                  kUnauthenticatedBytes);
  }
  if (ERR_peek_error() == 0 || received_.ended || received_.broken != 0) throw handshake_broken(start_.peer);
  throw handshake_failure(start_.peer, context_->by_certificate(), SSL_get_verify_result(ssl_.get()));
}

ByteStream::Got TlsHandshake::read(std::span<const iovec> places) {
  ByteStream::Got got;
  drained_ = false;
  received_.heard = false;
  for (PlaceCursor cursor(places); !cursor.at_end();) {
    std::span<char> part = cursor.next(~std::size_t{0});
    while (!part.empty()) {
      std::size_t size = 0;
      ERR_clear_error();
      const int result = SSL_read_ex(ssl_.get(), part.data(), part.size(), &size);
      if (result != 1) {
        const int why = SSL_get_error(ssl_.get(), result);
        got.heard = received_.heard;
        got.ended = received_.ended || why == SSL_ERROR_ZERO_RETURN;
        got.broken = received_.broken;
        flush();
        if (why == SSL_ERROR_WANT_READ || got.ended || got.broken != 0) return got;
        fail();
      }
      got.size += size;
      part = part.subspan(size);
    }
  }
  got.heard = true;
  got.more = true;
  return got;
}

bool TlsHandshake::write(std::span<const iovec> places) {
  for (PlaceCursor cursor(places); !cursor.at_end();) {
    const std::span<char> part = cursor.next(SSL3_RT_MAX_PLAIN_LENGTH);
    std::size_t written = 0;
    ERR_clear_error();
    if (SSL_write_ex(ssl_.get(), part.data(), part.size(), &written) != 1 || written != part.size()) fail();
  }
  return flush();
}

const EVP_CIPHER* TlsHandshake::cipher() const {
  return EVP_get_cipherbynid(SSL_CIPHER_get_cipher_nid(SSL_get_current_cipher(ssl_.get())));
}

KeySecret TlsHandshake::secret_of(Role sender) const {
  const std::string_view label = sender == Role::kDialer ? kDialerLabel : kListenerLabel;
  KeySecret secret;
  if (SSL_export_keying_material(ssl_.get(), secret.data(), secret.size(), label.data(), label.size(),
                                 nullptr, 0, 0) != 1) {
    throw Error(ErrorKind::kUnsupported, fmt::format("OpenSSL exports no key of the connection with '{}': {}",
                                                     start_.peer, tls_reason()));
  }
  return secret;
}

std::vector<char> TlsHandshake::take_unsent() {
  std::vector<char> unsent(out_.begin() + static_cast<std::ptrdiff_t>(sent_), out_.end());
  out_.clear();
  sent_ = 0;
  return unsent;
}

std::vector<char> TlsHandshake::take_ahead() {
  std::vector<char> ahead(ahead_.begin() + static_cast<std::ptrdiff_t>(ahead_at_),
                          ahead_.begin() + static_cast<std::ptrdiff_t>(ahead_end_));
  ahead_at_ = ahead_end_ = 0;
  return ahead;
}

}  // namespace torchspan::net
