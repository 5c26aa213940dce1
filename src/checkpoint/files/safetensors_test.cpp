#include "checkpoint/files/safetensors.h"

#include <algorithm>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "tests/support/errors.h"

namespace torchspan::checkpoint::safetensors_test {

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

Bytes file_with(std::string_view json, std::uint64_t data_bytes) {
  ByteWriter out;
  out.put(static_cast<std::uint64_t>(json.size()));
  out.put_bytes(std::as_bytes(std::span(json)));
  Bytes bytes = out.take();
  bytes.resize(bytes.size() + data_bytes);
  return bytes;
}

std::string refusal(std::string_view json, std::uint64_t data_bytes) {
  const Bytes bytes = file_with(json, data_bytes);
  return invalid_text([&] { parse_header(bytes, bytes.size(), "file"); });
}

Header parsed(std::string_view json, std::uint64_t data_bytes) {
  const Bytes bytes = file_with(json, data_bytes);
  return parse_header(bytes, bytes.size(), "file");
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirDataAndMetadata) {
  const Header header =
      parsed(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"__metadata__":{"format":"pt"},)"
             R"("a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}})",
             12);
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0], (HeaderEntry{"a", ElementType::kU8, {2, 2}, 0, 4}));
  EXPECT_EQ(header.entries[1], (HeaderEntry{"b", ElementType::kF32, {2}, 4, 12}));
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, AllowsScalarsAndEmptyTensorsAndNoTensors) {
  EXPECT_EQ(parsed("{}", 0).entries.size(), 0u);
  const Header header = parsed(
      R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0,9],"data_offsets":[8,8]}})",
      8);
  EXPECT_EQ(header.entries.size(), 2u);
}

TEST(SafetensorsHeader, RefusesWhatTheFormatForbids) {
  const std::string f32 = R"("dtype":"F32")";
  EXPECT_THAT(
      refusal(
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
          8),
      HasSubstr("'a' appears twice"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8),
              HasSubstr("begins at 4"));
  EXPECT_THAT(
      refusal(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
          6),
      HasSubstr("tensor 'b' begins at 2, but the data before it ends at 4"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5),
              HasSubstr("the file has 5"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4),
              HasSubstr("truncated"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
              HasSubstr("need 8 bytes"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("unknown dtype 'F33'"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4), HasSubstr("'shape'"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4),
              HasSubstr("'shape'"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4), HasSubstr("range"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
              HasSubstr("too large"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,0]}})", 0),
              HasSubstr("too large"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1),
              HasSubstr("whole number"));
  EXPECT_THAT(refusal(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4), HasSubstr("'dtype' is missing"));
  EXPECT_THAT(refusal(R"({"a":3})", 0), HasSubstr("expected an object"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"a":1}})", 0), HasSubstr("not a string"));
  EXPECT_THAT(refusal("{\"a\xff\":3}", 0), HasSubstr("malformed JSON"));
  EXPECT_THAT(refusal(R"({"a":{"b":{"c":{"d":{"e":{}}}}}})", 0), HasSubstr("nested deeper"));
  EXPECT_THAT(refusal(std::string(100000, '['), 0), HasSubstr("no safetensors header"));
  EXPECT_THAT(refusal("{" + std::string(100000, '['), 0), HasSubstr("malformed"));
  EXPECT_THAT(refusal("[]", 0), HasSubstr("no safetensors header"));
  EXPECT_THAT(refusal("{} x", 0), HasSubstr("malformed"));
}

TEST(SafetensorsHeader, ChecksItsLengthBeforeAnythingElse) {
  ByteWriter huge;
  huge.put(~std::uint64_t{0});
  EXPECT_THAT(invalid_text([&] { parse_header(huge.bytes(), 8, "file"); }), HasSubstr("the format allows"));
  ByteWriter cut;
  cut.put(std::uint64_t{100});
  EXPECT_THAT(invalid_text([&] { parse_header(cut.bytes(), 20, "file"); }), HasSubstr("truncated"));
  EXPECT_THAT(invalid_text([&] { parse_header({}, 0, "file"); }), HasSubstr("fewer than"));
}

TEST(SafetensorsHeader, IsReadBackAsWritten) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    std::vector<HeaderEntry> entries;
    for (std::size_t i = random() % 6; i > 0; --i) {
      HeaderEntry entry;
      entry.name = fmt::format("tensor \"{}\" \n ü {}", i, random() % 100);
      do {
        entry.type = static_cast<ElementType>(random() % 22);
      } while (bits_of(entry.type) % 8 != 0);
      for (std::size_t d = random() % 4; d > 0; --d)
        entry.shape.push_back(static_cast<std::int64_t>(random() % 4));
      entries.push_back(entry);
    }
    const EncodedHeader encoded = encode_header(entries, {{"format", "pt"}}, random() % 2 == 0 ? 8 : 4096);
    const std::uint64_t size = encoded.bytes.size() + encoded.header.data_bytes();
    const Header read = parse_header(encoded.bytes, size, "file");
    EXPECT_EQ(read.data_start, encoded.bytes.size());
    EXPECT_EQ(read.metadata, encoded.header.metadata);
    auto expected = encoded.header.entries;
    std::sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    EXPECT_EQ(read.entries, expected);
  }
}

TEST(SafetensorsHeader, IsReadOrRefusedWhateverOneByteBecomes) {
  const EncodedHeader encoded = encode_header(
      {{"weight", ElementType::kF32, {2, 3}}, {"bias", ElementType::kI64, {2}}}, {{"format", "pt"}});
  const std::uint64_t size = encoded.bytes.size() + encoded.header.data_bytes();
  for (std::size_t at = 0; at < encoded.bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Bytes damaged = encoded.bytes;
      damaged[at] ^= static_cast<std::byte>(1 << bit);
      try {
        const Header header = parse_header(damaged, size, "file");
        EXPECT_LE(header.data_start + header.data_bytes(), size);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      }
    }
  }
}

TEST(SafetensorsHeader, CannotBeWrittenWithNamesThatOthersCannotRead) {
  EXPECT_THAT(invalid_text([] {
                encode_header({{"a", ElementType::kU8, {1}}, {"a", ElementType::kU8, {1}}}, {});
              }),
              HasSubstr("two tensors 'a'"));
  EXPECT_THAT(invalid_text([] { encode_header({{"\xff", ElementType::kU8, {1}}}, {}); }), HasSubstr("UTF-8"));
}

}  // namespace torchspan::checkpoint::safetensors_test
