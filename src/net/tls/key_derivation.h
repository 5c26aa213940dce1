#pragma once
#include <array>
#include <span>
#include <string_view>

#include <torchspan/core/bytes.h>

namespace torchspan::net {

/// Bytes from which keys are derived.
using KeySecret = std::array<unsigned char, 32>;

/// Fills `key` with HKDF-SHA-256 (RFC 5869, without salt) of `secret` for the use that `label` names. Throws
/// kUnsupported if OpenSSL lacks it.
void derive_key(BytesView secret, std::string_view label, std::span<unsigned char> key);

}  // namespace torchspan::net
