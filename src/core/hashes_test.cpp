#include "core/api/hashes.h"

#include <gtest/gtest.h>
#include <random>
#include <string_view>

namespace torchspan::hashes_test {
namespace {

/// The definition: one bit at a time.
std::uint32_t crc_of_bits(BytesView bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

// The examples of RFC 3720, section B.4, and the check value of the CRC catalog.
TEST(Crc32c, MatchesTheStandardsExamples) {
  constexpr std::string_view kDigits = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(kDigits))), 0xe3069283u);
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0})), 0x8a9136aau);
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0xff})), 0x62a8ab43u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Crc32c, IsThatOfTheDefinitionForAllLengthsAndPlaces) {
  std::mt19937 random(1);
  Bytes bytes(128);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t first = 0; first < 9; ++first) {
    for (std::size_t size = 0; size + first <= bytes.size(); ++size) {
      const BytesView part = BytesView(bytes).subspan(first, size);
      ASSERT_EQ(crc32c(part), crc_of_bits(part)) << first << " " << size;
    }
  }
}

}  // namespace
}  // namespace torchspan::hashes_test
