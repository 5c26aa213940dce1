#include "net/tls/tls_failure.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

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

}  // namespace

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

}  // namespace torchspan::net
