#include "rendezvous/client/member_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

namespace torchspan::rendezvous::member_events_test {
namespace {

using ::testing::ElementsAre;

Member member_of(int rank, std::uint32_t incarnation) {
  Member member;
  member.name = "w" + std::to_string(rank);
  member.rank = rank;
  member.incarnation = incarnation;
  return member;
}

class MemberEventsTest : public ::testing::Test {
 protected:
  using Lines = std::shared_ptr<std::vector<std::string>>;
  void join(int rank, std::uint32_t incarnation) {
    events_.add(member_of(rank, incarnation), Presence::kPresent, nullptr);
  }
  void die(int rank, std::uint32_t incarnation) {
    events_.add(member_of(rank, incarnation), Presence::kDied,
                std::make_shared<Error>(ErrorKind::kDisconnected, "died"));
  }
  Lines watch(std::optional<std::weak_ptr<const void>> owner = {}) {
    const auto lines = std::make_shared<std::vector<std::string>>();
    const auto add = [lines](char sign, const Member& member) {
      lines->push_back(sign + member.name + "." + std::to_string(member.incarnation));
    };
    events_.watch({.joined = [add](const Member& member) { add('+', member); },
                   .died = [add](const Member& member, const Error&) { add('!', member); },
                   .left = {},
                   .owner = std::move(owner)});
    return lines;
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  Runtime runtime_{*executor_, "test", LogLevel::kOff};
  MemberEvents events_{runtime_};
};

TEST_F(MemberEventsTest, ANewWatcherGetsTheEventsOfTheLatestHolderOfEachRank) {
  const Lines early = watch();
  die(1, 0), join(1, 1), die(2, 0), die(1, 1);
  events_.deliver();
  EXPECT_THAT(*early, ElementsAre("!w1.0", "+w1.1", "!w2.0", "!w1.1"));
  const Lines late = watch();
  join(3, 0);
  events_.deliver();
  EXPECT_THAT(*late, ElementsAre("+w1.1", "!w2.0", "!w1.1", "+w3.0"));
  EXPECT_EQ(early->size(), 5u);
}

TEST_F(MemberEventsTest, AWatcherThatIsBehindMissesNothingThatHappenedSinceItCame) {
  const Lines lines = watch();
  die(1, 0), join(1, 1), die(1, 1), join(1, 2);
  const Lines late = watch();
  events_.deliver();
  EXPECT_THAT(*lines, ElementsAre("!w1.0", "+w1.1", "!w1.1", "+w1.2"));
  EXPECT_THAT(*late, ElementsAre("+w1.2"));
}

TEST_F(MemberEventsTest, KeepsAsManyEventsAsRanksHoweverManyWorkersDied) {
  const Lines lines = watch();
  constexpr int kRanks = 8, kLives = 1000;
  for (std::uint32_t life = 0; life < kLives; ++life) {
    for (int rank = 1; rank <= kRanks; ++rank) die(rank, life), join(rank, life + 1);
    events_.deliver();
  }
  EXPECT_EQ(lines->size(), 2u * kRanks * kLives);
  EXPECT_EQ(events_.size(), std::size_t{kRanks});
  const Lines late = watch();
  events_.deliver();
  EXPECT_EQ(late->size(), std::size_t{kRanks});
}

TEST_F(MemberEventsTest, DestroysCallbacksAfterTheirOwnerHasEnded) {
  auto owner = std::make_shared<int>(1);
  const Lines lines = watch(std::weak_ptr<const void>(owner));
  die(1, 0);
  events_.deliver();
  EXPECT_EQ(lines->size(), 1u);
  EXPECT_GT(lines.use_count(), 1);
  owner.reset();
  die(2, 0);
  events_.deliver();
  EXPECT_EQ(lines->size(), 1u);
  EXPECT_EQ(lines.use_count(), 1) << "the callbacks were destroyed";
}

TEST_F(MemberEventsTest, DestroysCallbacksOfEndedOwnersWhenOthersAreAdded) {
  std::vector<Lines> all;
  for (int group = 0; group < 100; ++group) {
    const auto owner = std::make_shared<int>(group);
    all.push_back(watch(std::weak_ptr<const void>(owner)));
  }
  watch();
  for (const Lines& lines : all) EXPECT_EQ(lines.use_count(), 1);
}

TEST_F(MemberEventsTest, EndsAllCallbacksOnce) {
  const Lines lines = watch();
  events_.clear();
  EXPECT_EQ(lines.use_count(), 1);
  die(1, 0);
  EXPECT_EQ(watch().use_count(), 1) << "destroyed at once";
  events_.deliver();
  EXPECT_TRUE(lines->empty());
}

}  // namespace
}  // namespace torchspan::rendezvous::member_events_test
