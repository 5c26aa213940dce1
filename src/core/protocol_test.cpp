#include <gtest/gtest.h>

#include <torchspan/detail/core/protocol.h>

#include "tests/support/errors.h"

namespace torchspan::protocol_test {
namespace {

using torchspan::testing::error_of;

TEST(Protocol, IsTheNewestCommonVersionAndTheCommonFeatures) {
  // Every pair of ranges within four versions, against the definition.
  for (std::uint16_t a = 1; a <= 4; ++a) {
    for (std::uint16_t b = a; b <= 4; ++b) {
      for (std::uint16_t c = 1; c <= 4; ++c) {
        for (std::uint16_t d = c; d <= 4; ++d) {
          std::optional<std::uint16_t> newest;
          for (std::uint16_t version = 1; version <= 4; ++version) {
            if (a <= version && version <= b && c <= version && version <= d) newest = version;
          }
          const auto common = common_protocol({a, b, 0b0110}, {c, d, 0b1100});
          ASSERT_EQ(common.has_value(), newest.has_value()) << a << b << c << d;
          if (!common) continue;
          EXPECT_EQ(*common, (Protocol{*newest, 0b0100})) << a << b << c << d;
        }
      }
    }
  }
}

TEST(Protocol, HasAFeatureOnlyIfAllBitsOfItsMaskAreCommon) {
  const Protocol protocol{1, 0b0101};
  EXPECT_TRUE(protocol.has(0));
  EXPECT_TRUE(protocol.has(0b0001));
  EXPECT_FALSE(protocol.has(0b0011));
}

TEST(Protocol, RangesAreEightBytesAndRejectedWithoutAVersion) {
  ByteWriter writer;
  put_range(writer, {2, 5, 0x80000001});
  EXPECT_EQ(writer.size(), kRangeBytes);
  ByteReader reader(writer.bytes());
  EXPECT_EQ(get_range(reader), (ProtocolRange{2, 5, 0x80000001}));
  EXPECT_EQ(describe_versions({2, 5, 0}), "versions 2 to 5");
  EXPECT_EQ(describe_versions({2, 2, 0}), "version 2");
  for (const ProtocolRange& wrong : {ProtocolRange{0, 1, 0}, ProtocolRange{3, 2, 0}}) {
    ByteWriter bytes;
    put_range(bytes, wrong);
    ByteReader read(bytes.bytes());
    EXPECT_EQ(error_of([&] { get_range(read); }).kind(), ErrorKind::kInvalid);
  }
}

/// The rule of docs/versions.md: two neighboring versions talk to each other.
TEST(Protocol, OfThisReleaseIncludesTheVersionBeforeItsNewestOrSaysWhyNot) {
  for (const ProtocolRange& range : {kWireProtocol, kStoreProtocol}) {
    EXPECT_LE(range.newest - range.oldest, 1) << "drop versions that no neighboring release speaks";
  }
}

}  // namespace
}  // namespace torchspan::protocol_test
