#pragma once
#include <cstdint>

#include <torchspan/core/bytes.h>

namespace torchspan {

/// CRC-32C (Castagnoli, RFC 3720), with reflected bits.
std::uint32_t crc32c(BytesView bytes);

}  // namespace torchspan
