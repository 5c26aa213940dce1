#include "rendezvous/messages/compact.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <random>

namespace torchspan::rendezvous::compact_test {
namespace {

template <class T, class Put, class Get>
std::size_t round_trip(const T& value, Put put, Get get) {
  ByteWriter writer;
  put(writer, value);
  ByteReader reader(writer.bytes());
  EXPECT_EQ(get(reader), value);
  EXPECT_TRUE(reader.at_end());
  return writer.size();
}

std::size_t size_of(const std::vector<int>& ranks) {
  return round_trip(
      Ranks(ranks), [](ByteWriter& writer, const Ranks& one) { one.encode(writer); },
      [](ByteReader& reader) { return Ranks::decode(reader); });
}

TEST(Compact, NumbersOf64BitsTakeUpToTenBytes) {
  for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{127}, std::uint64_t{128},
                                     std::uint64_t{1} << 63, std::numeric_limits<std::uint64_t>::max()}) {
    EXPECT_LE(round_trip(number, put_number, get_number), 10u);
  }
  for (const std::vector<int>& bytes : {std::vector<int>(11, 0x80),
                                        std::vector<int>{0x80},
                                        {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02}}) {
    Bytes raw;
    for (const int byte : bytes) raw.push_back(static_cast<std::byte>(byte));
    ByteReader reader(raw);
    EXPECT_THROW(get_number(reader), Error);
  }
}

TEST(Compact, RegularRanksTakeAFewBytes) {
  std::vector<int> all, strided;
  for (int rank = 0; rank < 4096; ++rank) all.push_back(rank);
  for (int rank = 3; rank < 4096; rank += 8) strided.push_back(rank);
  EXPECT_LE(size_of(all), 6u);
  EXPECT_LE(size_of(strided), 6u);
  all.erase(all.begin() + 1000);
  EXPECT_LE(size_of(all), 14u);
  EXPECT_EQ(size_of({}), 1u);
  size_of({5}), size_of({0, 7}), size_of({4, 3, 3, 3, 9}), size_of({kMaxWorkers - 1, 0, 5, 1});
}

TEST(Compact, RanksFindTheirMembers) {
  std::mt19937_64 random(6);
  SCOPED_TRACE("seed 6");
  for (int round = 0; round < 300; ++round) {
    std::vector<int> list;
    for (int rank = 0; rank < 40; ++rank) {
      if (round % 7 == 0 ? rank % 3 == 1 : random() % 3 != 0) list.push_back(rank);
    }
    const Ranks ranks(list);
    EXPECT_EQ(ranks.list(), list);
    EXPECT_EQ(ranks.size(), list.size());
    for (int rank = -1; rank < 45; ++rank)
      EXPECT_EQ(ranks.contains(rank), std::binary_search(list.begin(), list.end(), rank)) << rank;
  }
}

TEST(Compact, RandomRanksNumbersAndMembersSurvive) {
  std::mt19937_64 random(5);
  SCOPED_TRACE("seed 5");
  for (int round = 0; round < 200; ++round) {
    std::vector<int> ranks;
    std::vector<std::uint32_t> numbers;
    std::vector<Member> members;
    for (std::uint64_t i = random() % 20; i > 0; --i) {
      ranks.push_back(static_cast<int>(random() % (random() % 2 == 0 ? 8 : kMaxWorkers)));
      numbers.push_back(static_cast<std::uint32_t>(random() % 2 == 0 ? 0 : random()));
      Member member;
      member.rank = ranks.back();
      member.name = std::string(random() % 5, 'n') + std::to_string(random() % 100);
      member.address = std::string(random() % 300, 'a') + std::to_string(random() % 100);
      member.host = std::string(random() % 3 * 200, 'h');
      member.host_id = std::to_string(random() % 2);
      member.instance = random();
      member.pid = static_cast<std::int64_t>(random());
      member.uid = static_cast<std::int64_t>(random() % 2);
      member.start_ticks = random();
      member.functions_digest = random() % 2;
      member.incarnation = static_cast<std::uint32_t>(random() % 2);
      if (random() % 4 == 0) member.wire = {1, 2, static_cast<std::uint32_t>(random())};
      members.push_back(member);
    }
    size_of(ranks);
    round_trip(numbers, put_repeated, get_repeated);
    ByteWriter writer;
    put_members(writer, members);
    ByteReader reader(writer.bytes());
    const auto back = get_members(reader);
    EXPECT_TRUE(reader.at_end());
    ASSERT_EQ(back.size(), members.size());
    for (std::size_t i = 0; i < back.size(); ++i) {
      EXPECT_EQ(back[i].name, members[i].name);
      EXPECT_EQ(back[i].rank, members[i].rank);
      EXPECT_EQ(back[i].address, members[i].address);
      EXPECT_EQ(back[i].instance, members[i].instance);
      EXPECT_EQ(back[i].host, members[i].host);
      EXPECT_EQ(back[i].host_id, members[i].host_id);
      EXPECT_EQ(back[i].pid, members[i].pid);
      EXPECT_EQ(back[i].uid, members[i].uid);
      EXPECT_EQ(back[i].start_ticks, members[i].start_ticks);
      EXPECT_EQ(back[i].functions_digest, members[i].functions_digest);
      EXPECT_EQ(back[i].incarnation, members[i].incarnation);
      EXPECT_EQ(back[i].wire, members[i].wire);
    }
  }
}

TEST(Compact, SkipsTheFieldsThatANewerVersionAddedToAMember) {
  Member member;
  member.rank = 3;
  member.name = "worker3";
  ByteWriter writer;
  put_members(writer, std::span(&member, 1));
  Bytes bytes = writer.take();
  bytes.at(1) |= std::byte{128};  // the member's flags, after the count
  bytes.push_back(std::byte{2});
  bytes.insert(bytes.end(), 2, std::byte{0xEE});
  ByteReader reader(bytes);
  const auto back = get_members(reader);
  EXPECT_TRUE(reader.at_end());
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back[0].name, member.name);
  bytes.pop_back();
  ByteReader shortened(bytes);
  EXPECT_THROW(get_members(shortened), Error);
}

TEST(Compact, RefusesListsThatFewBytesMakeLongerThanAnyWorld) {
  const auto refused = [](std::initializer_list<std::uint64_t> numbers, auto get) {
    ByteWriter writer;
    for (const std::uint64_t number : numbers) put_number(writer, number);
    ByteReader reader(writer.bytes());
    EXPECT_THROW(get(reader), Error);
  };
  refused({1, std::uint64_t{1} << 40, 0, 2}, Ranks::decode);  // a run of 2^40 ranks
  refused({1, 0, 0}, Ranks::decode);                          // an empty run
  refused({1, 3, 0, std::uint64_t{1} << 50}, Ranks::decode);  // steps beyond every world
  refused({1, 1, 1}, Ranks::decode);                          // rank -1
  refused({9, 1, 0}, Ranks::decode);                          // more runs than bytes
  refused({1, std::uint64_t{1} << 40, 0}, get_repeated);
  refused({1, 2, std::uint64_t{1} << 32}, get_repeated);
  refused({std::uint64_t{1} << 60}, get_members);
}

}  // namespace
}  // namespace torchspan::rendezvous::compact_test
