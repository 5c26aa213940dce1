#include "core/api/hashes.h"

#include <array>
#include <cstring>
#include <nmmintrin.h>

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

std::uint32_t add_by_table(std::uint32_t crc, BytesView bytes) {
  for (const std::byte byte : bytes)
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<std::uint8_t>(byte)) & 0xff];
  return crc;
}

/// The processor's own instruction, which takes eight bytes at a time.
__attribute__((target("sse4.2"))) std::uint32_t add_by_instruction(std::uint32_t crc, BytesView bytes) {
  std::uint64_t wide = crc;
  while (bytes.size() >= sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    wide = _mm_crc32_u64(wide, word);
    bytes = bytes.subspan(sizeof(word));
  }
  crc = static_cast<std::uint32_t>(wide);
  for (const std::byte byte : bytes) crc = _mm_crc32_u8(crc, static_cast<std::uint8_t>(byte));
  return crc;
}

}  // namespace

std::uint32_t crc32c(BytesView bytes) {
  return ~(__builtin_cpu_supports("sse4.2") ? add_by_instruction(~0u, bytes) : add_by_table(~0u, bytes));
}

}  // namespace torchspan
