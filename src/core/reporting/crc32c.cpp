#include "core/api/crc32c.h"

#include <array>

namespace torchspan {
namespace {

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
    table[byte] = value;
  }
  return table;
}

constexpr auto kCrcTable = make_crc_table();

}  // namespace

std::uint32_t crc32c(BytesView bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes)
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<std::uint8_t>(byte)) & 0xff];
  return ~crc;
}

}  // namespace torchspan
