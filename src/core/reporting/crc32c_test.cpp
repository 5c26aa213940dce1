#include "core/api/crc32c.h"

#include <gtest/gtest.h>
#include <string_view>

namespace torchspan::crc32c_test {
namespace {

// The examples of RFC 3720, section B.4, and the check value of the CRC catalog.
TEST(Crc32c, MatchesTheStandardsExamples) {
  constexpr std::string_view kDigits = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(kDigits))), 0xe3069283u);
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0})), 0x8a9136aau);
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0xff})), 0x62a8ab43u);
  EXPECT_EQ(crc32c({}), 0u);
}

}  // namespace
}  // namespace torchspan::crc32c_test
