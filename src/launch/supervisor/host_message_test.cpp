#include <gtest/gtest.h>

#include "launch/supervisor/host_link.h"

namespace torchspan::launch::host_message_test {
namespace {

using Kind = HostMessage::Kind;

TEST(HostMessage, SurvivesItsEncoding) {
  for (const Kind kind : {Kind::kQuestion, Kind::kAnswer}) {
    const auto decoded =
        decode_host_message(encode_host_message({.kind = kind, .id = 1234567890123, .brief = true}));
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->version, HostMessage::kVersion);
    EXPECT_EQ(decoded->kind, kind);
    EXPECT_EQ(decoded->id, 1234567890123u);
    EXPECT_TRUE(decoded->brief);
  }
}

TEST(HostMessage, OfAnotherVersionStatesItsNumber) {
  Bytes other = encode_host_message({.version = 7, .kind = Kind::kQuestion, .id = 3});
  other.resize(other.size() + 100, std::byte{0xff});
  const auto decoded = decode_host_message(other);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->version, 7u);
  EXPECT_EQ(decoded->id, 3u);
}

TEST(HostMessage, IsNothingElse) {
  const Bytes good = encode_host_message({.id = 3});
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(decode_host_message(BytesView(good).first(size))) << size;
  }
  Bytes longer = good, kind = good, brief = good;
  longer.push_back(std::byte{0});
  kind[4] = std::byte{3};
  brief.back() = std::byte{2};
  for (const Bytes& bytes : {longer, kind, brief}) EXPECT_FALSE(decode_host_message(bytes));
}

}  // namespace
}  // namespace torchspan::launch::host_message_test
