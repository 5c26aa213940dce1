#include <cmath>
#include <cstdint>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <random>

#include <torchspan/core/bytes.h>

namespace torchspan::bytes_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Color : std::uint16_t { kRed = 1, kBlue = 0xBEEF };

template <class Body>
void expect_invalid(Body body) {
  try {
    body();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
  }
}

TEST(Bytes, AreLittleEndianAndUnpadded) {
  ByteWriter writer;
  writer.put(std::uint8_t{1});
  writer.put(std::uint32_t{0x05040302});
  writer.put(Color::kBlue);
  std::vector<int> values;
  for (std::byte byte : writer.bytes()) values.push_back(static_cast<int>(byte));
  EXPECT_THAT(values, ElementsAre(1, 2, 3, 4, 5, 0xEF, 0xBE));
}

TEST(Bytes, RoundTripExtremeNumbersAndEveryWidth) {
  ByteWriter writer;
  writer.put(true);
  writer.put(std::numeric_limits<std::int8_t>::min());
  writer.put(std::numeric_limits<std::uint64_t>::max());
  writer.put(-0.0);
  writer.put(std::numeric_limits<float>::infinity());
  writer.put(Color::kRed);
  writer.put_string("");
  writer.put_string(std::string_view("a\0b", 3));
  ByteReader reader(writer.bytes());
  EXPECT_TRUE(reader.get<bool>());
  EXPECT_EQ(reader.get<std::int8_t>(), -128);
  EXPECT_EQ(reader.get<std::uint64_t>(), ~std::uint64_t{0});
  EXPECT_TRUE(std::signbit(reader.get<double>()));
  EXPECT_EQ(reader.get<float>(), std::numeric_limits<float>::infinity());
  EXPECT_EQ(reader.get<Color>(), Color::kRed);
  EXPECT_EQ(reader.get_string(), "");
  EXPECT_EQ(reader.get_string(), std::string("a\0b", 3));
  EXPECT_TRUE(reader.at_end());
  reader.expect_end();
}

/// A random sequence of values: written once, and read back by the same plan.
struct Plan {
  std::vector<int> kinds;
  std::vector<std::uint64_t> numbers;
  std::vector<std::string> texts;

  explicit Plan(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const std::size_t length = 1 + random() % 12;
    for (std::size_t i = 0; i < length; ++i) {
      kinds.push_back(static_cast<int>(random() % 4));
      numbers.push_back(random());
      texts.emplace_back(random() % 9, static_cast<char>(random()));
    }
  }
  Bytes write() const {
    ByteWriter writer;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] == 0) writer.put(static_cast<std::uint8_t>(numbers[i]));
      if (kinds[i] == 1) writer.put(static_cast<std::int32_t>(numbers[i]));
      if (kinds[i] == 2) writer.put(numbers[i]);
      if (kinds[i] == 3) writer.put_string(texts[i]);
    }
    return writer.take();
  }
  void read(ByteReader& reader) const {
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      switch (kinds[i]) {
        case 0:
          EXPECT_EQ(reader.get<std::uint8_t>(), static_cast<std::uint8_t>(numbers[i]));
          break;
        case 1:
          EXPECT_EQ(reader.get<std::int32_t>(), static_cast<std::int32_t>(numbers[i]));
          break;
        case 2:
          EXPECT_EQ(reader.get<std::uint64_t>(), numbers[i]);
          break;
        default:
          EXPECT_EQ(reader.get_string(), texts[i]);
      }
    }
    reader.expect_end();
  }
};

TEST(Bytes, RoundTripRandomSequencesAndRefuseEveryTruncation) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const Plan plan(seed);
    const Bytes whole = plan.write();
    ByteReader reader(whole);
    plan.read(reader);
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const Bytes part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
      ByteReader short_reader(part);
      expect_invalid([&] { plan.read(short_reader); });
    }
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    ByteReader long_reader(longer);
    expect_invalid([&] { plan.read(long_reader); });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ByteReader, KeepsItsPositionAfterAnError) {
  ByteWriter writer;
  writer.put(std::uint16_t{7});
  ByteReader reader(writer.bytes());
  expect_invalid([&] { reader.get<std::uint32_t>(); });
  EXPECT_EQ(reader.get<std::uint16_t>(), 7);
}

TEST(ByteReader, RejectsAStringLongerThanTheRemainingBytes) {
  ByteWriter writer;
  writer.put(std::numeric_limits<std::uint32_t>::max());
  writer.put_bytes(std::as_bytes(std::span("xyz")));
  ByteReader reader(writer.bytes());
  expect_invalid([&] { reader.get_string(); });
}

TEST(ByteReader, RejectsACountBeyondTheRemainingBytes) {
  const auto count_of = [](std::uint32_t count, std::size_t payload, std::size_t least) {
    ByteWriter writer;
    writer.put(count);
    writer.put_bytes(Bytes(payload));
    ByteReader reader(writer.bytes());
    return reader.get_count(least);
  };
  EXPECT_EQ(count_of(0, 0, 8), 0u);
  EXPECT_EQ(count_of(3, 24, 8), 3u);
  EXPECT_EQ(count_of(3, 31, 8), 3u);
  expect_invalid([&] { count_of(4, 31, 8); });
  expect_invalid([&] { count_of(1, 0, 1); });
  expect_invalid([&] { count_of(std::numeric_limits<std::uint32_t>::max(), 1000, 1); });
  expect_invalid([&] { count_of(2, 1000, std::numeric_limits<std::size_t>::max()); });
  expect_invalid([&] { count_of(2, 1000, std::numeric_limits<std::size_t>::max() / 2 + 1); });
  expect_invalid([&] { count_of(std::numeric_limits<std::uint32_t>::max(), 1000, 0); });
}

TEST(ByteReader, ReportsUnreadBytes) {
  const Bytes bytes(5);
  ByteReader reader(bytes);
  reader.get<std::uint16_t>();
  EXPECT_EQ(reader.left(), 3u);
  try {
    reader.expect_end();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("3 bytes are left over at offset 2"));
  }
}

TEST(ByteWriter, AppendsToGivenBytesAndPatchesOnlyWhatWasWritten) {
  ByteWriter writer(Bytes(2, std::byte{9}));
  writer.put(std::uint32_t{0});
  writer.patch(2, std::uint32_t{0xAABBCCDD});
  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.get<std::uint16_t>(), 0x0909);
  EXPECT_EQ(reader.get<std::uint32_t>(), 0xAABBCCDDu);
  expect_invalid([&] { writer.patch(3, std::uint32_t{1}); });
  expect_invalid([&] { writer.patch(7, std::uint8_t{1}); });
  expect_invalid([&] { writer.patch(std::numeric_limits<std::size_t>::max(), std::uint8_t{1}); });
  EXPECT_EQ(writer.take().size(), 6u);
}

}  // namespace
}  // namespace torchspan::bytes_test
