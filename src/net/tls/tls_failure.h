#pragma once
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::net {

/// The error of a failed TLS handshake, from OpenSSL's error queue and the result of the peer's certificate:
/// kDenied (one side did not prove itself), kUnsupported (no TLS 1.3) or kInvalid (no TLS at all).
Error handshake_failure(const std::string& peer, bool by_certificate, long certificate_result);

}  // namespace torchspan::net
