#include "net/ucx/inbox.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <gmock/gmock.h>
#include <map>
#include <random>

#include "net/ucx/greeting.h"
#include "tests/support/errors.h"

namespace torchspan::net::inbox_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::kind_of;

Bytes pattern(std::size_t size, unsigned salt) {
  Bytes bytes(size);
  std::minstd_rand random(salt + 1);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
  return bytes;
}

/// The sender's output: a stream, and segments beside it.
struct Sender {
  void send(BytesView header, const std::vector<Bytes>& contents, std::size_t apart_from) {
    std::vector<Segment> parts;
    std::vector<std::uint64_t> numbers;
    for (const Bytes& bytes : contents) {
      parts.push_back({bytes.data(), bytes.size(), nullptr});
      numbers.push_back(bytes.size() >= apart_from ? ++segments_made : 0);
    }
    const FramePrefix prefix(header, parts, numbers);
    append(prefix.bytes());
    append(header);
    for (std::size_t i = 0; i < contents.size(); ++i) {
      if (numbers[i] == 0) {
        append(contents[i]);
      } else {
        append(std::as_bytes(std::span(&numbers[i], 1)));
        segments.emplace_back(numbers[i], contents[i]);
      }
    }
  }
  void append(BytesView bytes) { stream.insert(stream.end(), bytes.begin(), bytes.end()); }

  Bytes stream;
  std::vector<std::pair<std::uint64_t, Bytes>> segments;
  std::uint64_t segments_made = 0;
};

Bytes contents_of(const Buffer& buffer) { return {buffer.data, buffer.data + buffer.size}; }

TEST(UcxInboxTest, ReassemblesChunksAndSegmentsInAnyArrivalOrder) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 50; ++round) {
    Sender sender;
    std::vector<std::vector<Bytes>> sent;
    for (int i = 0; i < 20; ++i) {
      std::vector<Bytes> contents;
      for (unsigned s = random() % 4; s != 0; --s) contents.push_back(pattern(random() % 3000, random()));
      sender.send(pattern(random() % 100, i), contents, 1000);
      sent.push_back(std::move(contents));
    }
    // Events are shuffled over short distances, as when one active message overtakes another.
    std::vector<std::pair<unsigned, std::function<void(UcxInbox&)>>> events;
    std::uint64_t number = 0;
    for (std::size_t at = 0; at < sender.stream.size(); ++number) {
      const std::size_t size = std::min<std::size_t>(sender.stream.size() - at, random() % 700 + 1);
      Bytes chunk(sender.stream.begin() + at, sender.stream.begin() + at + size);
      events.emplace_back(number + random() % 20, [=](UcxInbox& inbox) { inbox.add_chunk(number, chunk); });
      at += size;
    }
    std::map<void*, const Bytes*> remote;
    for (const auto& segment : sender.segments) {
      void* const descriptor = const_cast<Bytes*>(&segment.second);
      const bool eager = random() % 4 == 0;
      if (!eager) remote.emplace(descriptor, &segment.second);
      UcxOffer offer{.size = segment.second.size(), .descriptor = eager ? nullptr : descriptor};
      if (eager) offer.bytes = segment.second;
      events.emplace_back(random() % (number + 1),
                          [=, n = segment.first](UcxInbox& inbox) { inbox.add_offer(n, offer); });
    }
    std::ranges::stable_sort(events, {}, [](const auto& event) { return event.first; });

    UcxInbox inbox{TransportOptions()};
    std::vector<Message> came;
    for (const auto& [when, happen] : events) {
      happen(inbox);
      while (const auto fetch = inbox.next_fetch()) {
        const Bytes& bytes = *remote.at(fetch->descriptor);
        ASSERT_EQ(fetch->into.size, bytes.size());
        std::memcpy(fetch->into.data, bytes.data(), bytes.size());
        inbox.fetched(fetch->number);
      }
      inbox.take(came);
    }
    ASSERT_EQ(came.size(), sent.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      ASSERT_EQ(came[i].segments.size(), sent[i].size());
      for (std::size_t s = 0; s < sent[i].size(); ++s) {
        ASSERT_EQ(contents_of(came[i].segments[s]), sent[i][s]);
      }
    }
    EXPECT_THAT(inbox.abandon(), IsEmpty());
  }
}

TransportOptions limited(const std::function<void(TransportOptions&)>& change) {
  TransportOptions options;
  change(options);
  return options;
}

class MalformedUcxPeer : public ::testing::Test {
 protected:
  MalformedUcxPeer() {
    sender_.send({}, {pattern(2000, 1)}, 1000);
    sender_.send({}, {pattern(10, 2)}, 1000);
  }
  Bytes frame(std::size_t from, std::size_t size) const {
    return {sender_.stream.begin() + from, sender_.stream.begin() + from + size};
  }
  Sender sender_;
  int offered_ = 0;
  UcxInbox inbox_{limited([](TransportOptions& options) { options.max_message = 1 << 20; })};
  UcxOffer offer(std::uint64_t size) { return {.size = size, .descriptor = &offered_}; }
};

TEST_F(MalformedUcxPeer, GetsNoMemoryForChunksThatAreNotDue) {
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, {}); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, Bytes(kUcxChunkBytes + 1)); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(100'000, Bytes(1)); }), ErrorKind::kInvalid);
  inbox_.add_chunk(0, frame(0, 5));
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, frame(0, 5)); }), ErrorKind::kInvalid);
  inbox_.add_chunk(2, frame(10, 5));
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(2, frame(10, 5)); }), ErrorKind::kInvalid);
}

TEST_F(MalformedUcxPeer, IsCutOffForBytesThatAreNotAFrame) {
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, pattern(1000, 7)); }), ErrorKind::kInvalid);
}

TEST_F(MalformedUcxPeer, GetsNoMemoryForSegmentsThatAreNotDue) {
  EXPECT_EQ(kind_of([&] { inbox_.add_offer(0, offer(2000)); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { inbox_.add_offer(100'000, offer(2000)); }), ErrorKind::kInvalid);
  inbox_.add_chunk(0, sender_.stream);
  EXPECT_FALSE(inbox_.next_fetch()) << "nothing is allocated on the word of a frame";
  EXPECT_EQ(kind_of([&] { inbox_.add_offer(1, offer(2001)); }), ErrorKind::kInvalid);
  inbox_.add_offer(1, offer(2000));
  EXPECT_EQ(kind_of([&] { inbox_.add_offer(1, offer(2000)); }), ErrorKind::kInvalid);
  const auto fetch = inbox_.next_fetch();
  ASSERT_TRUE(fetch);
  EXPECT_EQ(fetch->into.size, 2000u);
  EXPECT_EQ(kind_of([&] { inbox_.add_offer(1, offer(2000)); }), ErrorKind::kInvalid);
}

TEST_F(MalformedUcxPeer, IsCutOffForAnOfferThatDoesNotFitItsFrameWhicheverComesFirst) {
  inbox_.add_offer(1, offer(1999));
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, sender_.stream); }), ErrorKind::kInvalid);
  EXPECT_EQ(inbox_.abandon(), std::vector<void*>{&offered_});
}

TEST_F(MalformedUcxPeer, IsCutOffForSegmentsAnnouncedOutOfOrderOrTwice) {
  Sender twice;
  twice.send({}, {pattern(2000, 1)}, 1000);
  const Bytes first = twice.stream;
  inbox_.add_chunk(0, first);
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(1, first); }), ErrorKind::kInvalid);
}

TEST_F(MalformedUcxPeer, CannotFillMemoryBehindASegmentThatNeverArrives) {
  inbox_.add_chunk(0, sender_.stream);
  Sender bulk;
  bulk.send(Bytes(kUcxChunkBytes - kPrefixBytes), {}, 1000);
  ASSERT_EQ(bulk.stream.size(), kUcxChunkBytes);
  std::vector<Message> came;
  std::uint64_t number = 1;
  EXPECT_EQ(kind_of([&] {
              for (; number < 10'000; ++number) {
                inbox_.add_chunk(number, bulk.stream);
                inbox_.take(came);
              }
            }),
            ErrorKind::kInvalid);
  EXPECT_GT(number * kUcxChunkBytes, kUcxAhead) << "an honest sender goes so far";
  EXPECT_LE(number * kUcxChunkBytes, 3 * kUcxAhead);
  EXPECT_TRUE(came.empty());
}

TEST_F(MalformedUcxPeer, CannotHaveSegmentsFetchedBehindOneThatNeverArrives) {
  inbox_.add_chunk(0, sender_.stream);
  std::uint64_t chunk = 1, number = 2;
  EXPECT_EQ(kind_of([&] {
              for (; number < 10'000; ++number) {
                sender_.stream.clear();
                sender_.send({}, {Bytes(1000)}, 1000);
                inbox_.add_chunk(chunk++, sender_.stream);
                inbox_.add_offer(number, offer(1000));
                EXPECT_TRUE(inbox_.next_fetch());
                inbox_.fetched(number);
                std::vector<Message> came;
                inbox_.take(came);
              }
            }),
            ErrorKind::kInvalid);
  EXPECT_GT(number, kUcxSegmentsUnderWay) << "an honest sender goes so far";
  EXPECT_LE(number, 2000u);
}

/// Segments of an incomplete frame cannot be taken, but they are fetched.
TEST(UcxInboxTest, FetchesAllSegmentsOfALargeMessageBeforeItsFrameIsComplete) {
  constexpr std::uint64_t kSegments = 3000;
  Sender sender;
  sender.send({}, std::vector<Bytes>(kSegments, Bytes(1000)), 1000);
  UcxInbox inbox{TransportOptions()};
  const std::size_t all_but_one = sender.stream.size() - 1;
  std::uint64_t chunk = 0;
  for (std::size_t at = 0; at < all_but_one; at += kUcxChunkBytes) {
    const std::size_t size = std::min(kUcxChunkBytes, all_but_one - at);
    inbox.add_chunk(chunk++, {sender.stream.begin() + at, sender.stream.begin() + at + size});
  }
  int offered = 0;
  for (std::uint64_t number = 1; number < kSegments; ++number) {
    inbox.add_offer(number, {.size = 1000, .descriptor = &offered});
    ASSERT_TRUE(inbox.next_fetch()) << number;
    inbox.fetched(number);
  }
  inbox.add_chunk(chunk, {sender.stream.end() - 1, sender.stream.end()});
  inbox.add_offer(kSegments, {.size = 1000, .descriptor = &offered});
  ASSERT_TRUE(inbox.next_fetch());
  inbox.fetched(kSegments);
  std::vector<Message> came;
  inbox.take(came);
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0].segments.size(), kSegments);
}

TEST_F(MalformedUcxPeer, IsCutOffBeyondTheLimitsAndWithoutMemory) {
  Sender large;
  large.send({}, {Bytes(2 << 20)}, 1000);
  EXPECT_EQ(kind_of([&] { inbox_.add_chunk(0, large.stream); }), ErrorKind::kInvalid);
  UcxInbox poor{
      limited([](TransportOptions& options) { options.allocator = [](std::size_t) { return Buffer(); }; })};
  poor.add_chunk(0, frame(0, sender_.stream.size() - 10));
  poor.add_offer(1, offer(2000));
  EXPECT_EQ(kind_of([&] { poor.next_fetch(); }), ErrorKind::kOverloaded);
  EXPECT_EQ(poor.abandon(), std::vector<void*>{&offered_});
}

/// A frame that announces a segment of 2000 bytes for target 5.
class UcxDeviceSegments : public ::testing::Test {
 protected:
  UcxDeviceSegments() {
    sender_.send({}, {pattern(2000, 1)}, 1000);
    const std::uint64_t word = UcxAnnouncement{1, 5}.word();
    std::memcpy(sender_.stream.data() + sender_.stream.size() - sizeof word, &word, sizeof word);
  }
  UcxOffer offer() { return {.size = 2000, .descriptor = &offered_}; }
  Buffer memory() { return {memory_.data(), memory_.size(), std::make_shared<int>()}; }

  Sender sender_;
  Bytes memory_ = Bytes(2000);
  int offered_ = 0;
};

TEST_F(UcxDeviceSegments, AreFetchedIntoMemoryOfTheDevice) {
  UcxInbox inbox(TransportOptions(), [&](std::uint32_t target, std::size_t size) {
    EXPECT_EQ(target, 5);
    EXPECT_EQ(size, 2000);
    return memory();
  });
  inbox.add_chunk(0, sender_.stream);
  inbox.add_offer(1, offer());
  const auto fetch = inbox.next_fetch();
  ASSERT_TRUE(fetch);
  EXPECT_EQ(fetch->into.data, memory_.data());
  EXPECT_EQ(fetch->into.device_target, 5);
  inbox.fetched(1);
  std::vector<Message> came;
  inbox.take(came);
  ASSERT_EQ(came.size(), 1);
  EXPECT_EQ(came[0].segments.at(0).device_target, 5);
}

TEST_F(UcxDeviceSegments, GoToTheHostIfTheDeviceHasNoRoomOrTheirBytesCameWithTheOffer) {
  for (const bool came_whole : {false, true}) {
    UcxInbox inbox(TransportOptions(), [&](std::uint32_t, std::size_t) {
      EXPECT_FALSE(came_whole) << "the processor cannot write there";
      return Buffer();
    });
    inbox.add_offer(1, came_whole ? UcxOffer{.size = 2000, .bytes = pattern(2000, 1)} : offer());
    inbox.add_chunk(0, sender_.stream);
    const auto fetch = inbox.next_fetch();
    ASSERT_EQ(fetch.has_value(), !came_whole);
    if (fetch) {
      EXPECT_EQ(fetch->into.device_target, 0);
      std::memset(fetch->into.data, 1, 2000);
      inbox.fetched(1);
    }
    std::vector<Message> came;
    inbox.take(came);
    ASSERT_EQ(came.size(), 1);
    EXPECT_EQ(came[0].segments.at(0).device_target, 0);
    if (came_whole) EXPECT_EQ(contents_of(came[0].segments.at(0)), pattern(2000, 1));
  }
}

TEST_F(UcxDeviceSegments, AreRefusedWithoutDevicesAndForUnknownTargets) {
  UcxInbox without(TransportOptions{});
  EXPECT_EQ(kind_of([&] { without.add_chunk(0, sender_.stream); }), ErrorKind::kInvalid);
  UcxInbox other(TransportOptions(), [](std::uint32_t, std::size_t) -> Buffer {
    throw Error(ErrorKind::kInvalid, "not offered");
  });
  other.add_chunk(0, sender_.stream);
  other.add_offer(1, offer());
  EXPECT_EQ(kind_of([&] { other.next_fetch(); }), ErrorKind::kInvalid);
  EXPECT_EQ(other.abandon(), std::vector<void*>{&offered_});
}

TEST(UcxGreetingTest, ReadsWhatItWroteAndNothingElse) {
  const UcxGreeting greeting{1, 13, 0x1234567890abcdef, pattern(200, 3)};
  const Bytes bytes = encode(greeting);
  EXPECT_EQ(std::get<UcxGreeting>(decode_ucx_note(bytes, "peer")), greeting);
  EXPECT_TRUE(std::holds_alternative<UcxFarewell>(decode_ucx_note(encode(UcxFarewell{}), "peer")));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(kind_of([&] { decode_ucx_note(BytesView(bytes).first(size), "peer"); }), ErrorKind::kInvalid);
  }
  Bytes longer = bytes;
  longer.push_back({});
  EXPECT_EQ(kind_of([&] { decode_ucx_note(longer, "peer"); }), ErrorKind::kInvalid);
  for (std::size_t at = 0; at < 8; ++at) {
    Bytes damaged = bytes;
    damaged[at] ^= std::byte{0x40};
    EXPECT_EQ(kind_of([&] { decode_ucx_note(damaged, "peer"); }), ErrorKind::kInvalid) << at;
  }
}

TEST(UcxGreetingTest, AcceptsOtherVersionsFromTheFirstCompatibleVersionOn) {
  const auto meet = [](unsigned theirs, unsigned ours) {
    check_ucx_versions({1, theirs, 0, {}}, {1, ours, 0, {}}, "peer");
  };
  meet(13, 13);
  meet(16, 18);
  for (const auto& versions : {std::pair{13u, 14u}, {13u, 18u}, {18u, 13u}}) {
    EXPECT_EQ(kind_of([&] { meet(versions.first, versions.second); }), ErrorKind::kUnsupported);
  }
}

}  // namespace
}  // namespace torchspan::net::inbox_test
