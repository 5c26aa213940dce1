#pragma once
#include <cstdint>
#include <string_view>

#include <torchspan/core/bytes.h>

namespace torchspan {

/// CRC-32C (Castagnoli, RFC 3720), with reflected bits.
std::uint32_t crc32c(BytesView bytes);

/// FNV-1a with 64 bits, continued from `hash`. For numbers that all processes compute alike; not for data that may be forged.
constexpr std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = 0xcbf29ce484222325) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace torchspan
