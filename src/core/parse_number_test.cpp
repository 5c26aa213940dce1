#include "core/api/parse_number.h"

#include <cstdint>
#include <gtest/gtest.h>

namespace torchspan::parse_number_test {
namespace {

TEST(ParseNumber, ReturnsTheNumberThatIsTheWholeText) {
  EXPECT_EQ(parse_number<int>("-17"), -17);
  EXPECT_EQ(parse_number<std::uint16_t>("65535"), 65535);
  EXPECT_EQ(parse_number<double>("2.5e3"), 2500);
}

TEST(ParseNumber, ReturnsNothingForOtherTextsAndNumbersThatDoNotFit) {
  for (const char* text : {"", " 1", "1 ", "+1", "1x", "0x10", "x"})
    EXPECT_FALSE(parse_number<int>(text)) << text;
  EXPECT_FALSE(parse_number<std::uint16_t>("65536"));
  EXPECT_FALSE(parse_number<std::uint16_t>("-1"));
  EXPECT_FALSE(parse_number<double>("1e999"));
}

}  // namespace
}  // namespace torchspan::parse_number_test
