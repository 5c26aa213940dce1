#include "net/framing.h"

#include <algorithm>
#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <string>

namespace torchspan::net::framing_test {
namespace {

using ::testing::HasSubstr;

constexpr FrameLimits kLimits{1 << 20, 1 << 22, 1000};

struct Plain {
  Bytes header;
  std::vector<Bytes> segments;
  friend bool operator==(const Plain&, const Plain&) = default;
};

Bytes random_bytes(std::mt19937& random, std::size_t size) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Plain random_message(std::mt19937& random) {
  const auto some = [&](std::size_t most) { return random() % 4 == 0 ? 0 : random() % (most + 1); };
  Plain message{random_bytes(random, some(300)), {}};
  message.segments.resize(random() % 10 == 0 ? some(40) : some(4));
  for (Bytes& segment : message.segments) segment = random_bytes(random, some(2000));
  return message;
}

Bytes wire_of(const Plain& message) {
  std::vector<Segment> segments;
  for (const Bytes& bytes : message.segments) segments.push_back({bytes.data(), bytes.size(), nullptr});
  const FramePrefix prefix(message.header, segments);
  Bytes wire(prefix.bytes().begin(), prefix.bytes().end());
  wire.insert(wire.end(), message.header.begin(), message.header.end());
  for (const Bytes& bytes : message.segments) wire.insert(wire.end(), bytes.begin(), bytes.end());
  EXPECT_EQ(wire.size(), check_message(message.header, segments, kLimits));
  return wire;
}

std::vector<Plain> plain(const std::vector<Message>& messages) {
  std::vector<Plain> all;
  for (const Message& message : messages) {
    Plain& one = all.emplace_back(Plain{message.header, {}});
    for (const Buffer& buffer : message.segments)
      one.segments.emplace_back(buffer.data, buffer.data + buffer.size);
  }
  return all;
}

/// The first bytes of a frame with the given numbers.
Bytes raw_frame(std::uint32_t segments, std::uint64_t header, const std::vector<std::uint64_t>& sizes = {}) {
  ByteWriter writer;
  writer.put(std::uint16_t{0x5354});
  writer.put(FrameType::kMessage);
  writer.put(std::uint8_t{0});
  writer.put(segments);
  writer.put(header);
  for (std::uint64_t size : sizes) writer.put(size);
  return writer.take();
}

Bytes striped_frame(std::uint64_t size) {
  Bytes wire = raw_frame(1, 0, {size});
  wire[2] = static_cast<std::byte>(FrameType::kStriped);
  return wire;
}

Error failure_of(BytesView wire, FrameLimits limits = kLimits, BufferAllocator allocator = allocate_buffer) {
  FrameParser parser(limits, std::move(allocator));
  std::vector<Message> finished;
  try {
    parser.feed(wire, finished);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kInvalid, "");
}

TEST(Framing, DecodesRandomMessagesForEverySplitOfTheStream) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<Plain> sent(random() % 6);
    Bytes wire;
    for (Plain& message : sent) {
      message = random_message(random);
      const Bytes bytes = wire_of(message);
      wire.insert(wire.end(), bytes.begin(), bytes.end());
    }
    const std::size_t most = std::size_t{1} << random() % 14;
    FrameParser parser(kLimits, allocate_buffer);
    std::vector<Message> finished;
    for (std::size_t at = 0; at < wire.size();) {
      const std::size_t size = std::min(1 + random() % most, wire.size() - at);
      parser.feed(BytesView(wire).subspan(at, size), finished);
      at += size;
    }
    EXPECT_EQ(plain(finished), sent);
    EXPECT_FALSE(parser.mid_frame());
  }
}

TEST(Framing, DecodesRandomMessagesReceivedInPlace) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<Plain> sent(1 + random() % 6);
    Bytes wire;
    for (Plain& message : sent) {
      message = random_message(random);
      const Bytes bytes = wire_of(message);
      wire.insert(wire.end(), bytes.begin(), bytes.end());
    }
    FrameParser parser(kLimits, allocate_buffer);
    std::vector<Message> finished;
    std::size_t in_place = 0;
    for (std::size_t at = 0; at < wire.size();) {
      std::array<iovec, 5> places;
      const std::size_t count = parser.targets(std::span(places).first(1 + random() % places.size()));
      std::size_t left = std::min<std::size_t>(1 + random() % 3000, wire.size() - at), direct = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t size = std::min(left, places[i].iov_len);
        std::memcpy(places[i].iov_base, wire.data() + at, size);
        at += size, left -= size, direct += size;
      }
      parser.received(direct, finished);
      parser.feed(BytesView(wire).subspan(at, left), finished);
      at += left, in_place += direct;
    }
    EXPECT_EQ(plain(finished), sent);
    EXPECT_FALSE(parser.mid_frame());
    std::size_t bulk = 0;
    for (const Plain& message : sent) {
      for (const Bytes& segment : message.segments) bulk += segment.size();
    }
    EXPECT_LE(in_place, bulk);
  }
}

TEST(Framing, ReportsWhetherTheStreamEndsInsideAFrame) {
  const Bytes wire = wire_of({Bytes(3), {Bytes(2), {}, Bytes(1)}});
  FrameParser parser(kLimits, allocate_buffer);
  std::vector<Message> finished;
  EXPECT_FALSE(parser.mid_frame());
  for (std::size_t i = 0; i + 1 < wire.size(); ++i) {
    parser.feed(BytesView(wire).subspan(i, 1), finished);
    EXPECT_TRUE(parser.mid_frame()) << i;
    EXPECT_TRUE(finished.empty()) << i;
  }
  parser.feed(BytesView(wire).last(1), finished);
  EXPECT_FALSE(parser.mid_frame());
  EXPECT_EQ(finished.size(), 1u);
}

TEST(Framing, EndsWithAGoodbyeAndNothingElse) {
  FrameParser parser(kLimits, allocate_buffer);
  std::vector<Message> finished;
  parser.feed(wire_of({Bytes(1), {}}), finished);
  EXPECT_FALSE(parser.goodbye());
  parser.feed(goodbye_frame(), finished);
  EXPECT_TRUE(parser.goodbye());
  EXPECT_FALSE(parser.mid_frame());
  EXPECT_EQ(finished.size(), 1u);
  EXPECT_THROW(parser.feed(Bytes(1), finished), Error);
}

TEST(Framing, RejectsInvalidFramesAtTheirPrefix) {
  Bytes wire = wire_of({Bytes(1), {}});
  for (const std::size_t place : {0, 1, 2, 3}) {
    Bytes broken = wire;
    broken[place] ^= std::byte{0x40};
    EXPECT_EQ(failure_of(BytesView(broken).first(kPrefixBytes)).kind(), ErrorKind::kInvalid) << place;
  }
  auto goodbye = goodbye_frame();
  goodbye.back() = std::byte{1};
  EXPECT_EQ(failure_of(goodbye).kind(), ErrorKind::kInvalid);
}

TEST(Framing, RejectsLengthsBeyondTheLimitsAndNamesTheOption) {
  const auto never = [](std::size_t size) -> Buffer {
    ADD_FAILURE() << "allocated " << size;
    return {};
  };
  EXPECT_THAT(failure_of(raw_frame(0, kLimits.max_header + 1), kLimits, never).message(),
              HasSubstr("max_header"));
  EXPECT_THAT(failure_of(raw_frame(kLimits.max_segments + 1, 0), kLimits, never).message(),
              HasSubstr("max_segments"));
  EXPECT_THAT(failure_of(raw_frame(1, 0, {kLimits.max_message + 1}), kLimits, never).message(),
              HasSubstr("max_message"));
  EXPECT_THAT(failure_of(raw_frame(1, 1, {kLimits.max_message}), kLimits, never).message(),
              HasSubstr("max_message"));
  EXPECT_THAT(failure_of(raw_frame(UINT32_MAX, UINT64_MAX), kLimits, never).message(),
              HasSubstr("max_segments"));
}

TEST(Framing, RejectsLengthsWhoseSumOverflows) {
  const std::uint64_t half = std::uint64_t{1} << 63;
  const FrameLimits wide{1 << 20, half + 5, 10};
  EXPECT_THAT(failure_of(raw_frame(3, 0, {half, half, 1}), wide).message(), HasSubstr("max_message"));
}

TEST(Framing, AllocatesNothingForAnnouncedSizes) {
  std::size_t allocated = 0;
  FrameParser parser(kLimits, [&](std::size_t size) {
    allocated += size;
    return allocate_buffer(size);
  });
  std::vector<Message> finished;
  parser.feed(raw_frame(2, 10, {1 << 20, 1 << 20}), finished);
  EXPECT_EQ(allocated, 0u);
  parser.feed(Bytes(10), finished);
  EXPECT_EQ(allocated, 0u);
  parser.feed(Bytes(1), finished);
  EXPECT_EQ(allocated, std::size_t{1} << 20);
}

TEST(Framing, ReportsAnAllocatorThatFails) {
  Bytes wire = raw_frame(1, 0, {8});
  wire.resize(wire.size() + 8);
  EXPECT_EQ(failure_of(wire, kLimits, [](std::size_t) { return Buffer{}; }).kind(), ErrorKind::kOverloaded);
}

TEST(Framing, DeliversTheMessagesBeforeABrokenFrame) {
  Bytes wire = wire_of({Bytes(5), {Bytes(7)}});
  const std::size_t good = wire.size();
  wire.resize(good + kPrefixBytes);
  FrameParser parser(kLimits, allocate_buffer);
  std::vector<Message> finished;
  EXPECT_THROW(parser.feed(wire, finished), Error);
  EXPECT_EQ(finished.size(), 1u);
}

TEST(Framing, AcceptsStripedMessagesAndHeartbeatsOnlyWithLanes) {
  const Bytes striped = striped_frame(7);
  EXPECT_THAT(failure_of(striped).message(), HasSubstr("type 3"));
  EXPECT_THAT(failure_of(heartbeat_frame()).message(), HasSubstr("type 4"));
  FrameParser parser(kLimits, allocate_buffer, FrameDialect::kLanes);
  std::vector<Message> finished;
  parser.feed(heartbeat_frame(), finished);
  EXPECT_TRUE(finished.empty());
  parser.feed(wire_of({Bytes(5), {Bytes(7)}}), finished);
  parser.feed(striped, finished);
  ASSERT_EQ(finished.size(), 2u);
  const std::vector<FrameParser::Striped> all = parser.take_striped();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].index, 1u);
  EXPECT_EQ(all[0].sizes, std::vector<std::uint64_t>{7});
  EXPECT_FALSE(parser.mid_frame());
}

TEST(Framing, TakesLentSegmentsOnlyWithAnAdopterAndNeverInStripedMessages) {
  Bytes wire = raw_frame(1, 0, {9 | kLent});
  EXPECT_THAT(failure_of(wire).message(), HasSubstr("max_message"));
  const BufferAllocator none = [](std::size_t) { return Buffer{}; };
  wire.resize(wire.size() + kBlockNumberBytes, std::byte{3});
  EXPECT_EQ(failure_of(wire, {1 << 20, ~std::uint64_t{0}, 1000}, none).kind(), ErrorKind::kOverloaded);

  FrameParser parser(kLimits, none, FrameDialect::kLanes);
  std::vector<std::uint64_t> adopted;
  parser.adopt_with([&](std::uint64_t block, std::size_t size) {
    adopted.push_back(block);
    return allocate_buffer(size);
  });
  std::vector<Message> finished;
  parser.feed(wire, finished);
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].segments.at(0).size, 9u);
  EXPECT_EQ(adopted, std::vector<std::uint64_t>{0x0303'0303'0303'0303});
  EXPECT_THROW(parser.feed(striped_frame(9 | kLent), finished), Error);
}

TEST(Framing, ChecksAMessageBeforeItIsSent) {
  const Bytes header(kLimits.max_header + 1);
  EXPECT_THROW(check_message(header, {}, kLimits), Error);
  EXPECT_THROW(check_message({}, std::vector<Segment>(kLimits.max_segments + 1), kLimits), Error);
  const std::vector<Segment> large(2, {nullptr, kLimits.max_message / 2 + 1, nullptr});
  EXPECT_THROW(check_message({}, large, kLimits), Error);
  EXPECT_EQ(check_message({}, {}, kLimits), kPrefixBytes);
}

}  // namespace
}  // namespace torchspan::net::framing_test
