#include "rpc/references/rref_table.h"

#include <gtest/gtest.h>
#include <random>
#include <set>

namespace torchspan::rpc::rref_table_test {
namespace {

constexpr PeerId kSelf{0, 0}, kOther{1, 0}, kThird{2, 0};
using Why = Refusal::Why;
using Keep = RRefTable::Keep;

Keep thing() { return std::make_shared<int>(42); }

/// The table of worker 0 in a world of three, and the effects that it asks for.
struct Table : RRefTable {
  Table() : RRefTable(0) {
    join(kOther, effects);
    join(kThird, effects);
  }
  std::optional<Refusal> ask(GlobalId value, GlobalId fork, std::uint64_t number, PeerId from) {
    return receive({RRefMessage::Kind::kForkRequest, kSelf, value, fork, number, {}}, from, effects);
  }
  void forget(GlobalId value, GlobalId fork, PeerId from) {
    receive({RRefMessage::Kind::kUserDelete, kSelf, value, fork, 0, {}}, from, effects);
  }
  void give_up(GlobalId value, GlobalId fork, PeerId from) {
    receive({RRefMessage::Kind::kGivenUp, kSelf, value, fork, 0, "late"}, from, effects);
  }
  Effects effects;
};
/// Returns the id of the nth value that worker 1 makes on worker 0.
GlobalId made_by_other(std::uint64_t n) { return {kOther.rank, n}; }

TEST(NumberSet, StoresOnlyItsGaps) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    NumberSet numbers;
    std::set<std::uint64_t> all;
    for (int i = 0; i < 2000; ++i) {
      const std::uint64_t number = random() % 1000;
      ASSERT_EQ(numbers.insert(number), all.insert(number).second) << "seed " << seed;
      const std::uint64_t asked = random() % 1000;
      ASSERT_EQ(numbers.contains(asked), all.contains(asked)) << "seed " << seed;
    }
    std::size_t intervals = 0;
    for (const std::uint64_t number : all) intervals += all.contains(number + 1) ? 0 : 1;
    EXPECT_EQ(numbers.intervals(), intervals) << "seed " << seed;
  }
}

TEST(RRefTable, CountsAForkOfAValueWhoseCreationIsInFlight) {
  Table table;
  EXPECT_FALSE(table.ask(made_by_other(1), {1, 9}, 1, kThird));
  EXPECT_EQ(table.counts().forks, 1u);
  const Keep owner = thing();
  EXPECT_EQ(table.owned().creation_arrived(made_by_other(1), {1, 8}, owner), owner);
  table.forget(made_by_other(1), {1, 8}, kOther);
  EXPECT_TRUE(table.effects.released.empty()) << "the third worker holds it";
  table.forget(made_by_other(1), {1, 9}, kThird);
  EXPECT_EQ(table.effects.released.size(), 1u);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, RefusesAUseOfAValueThatIsGone) {
  Table table;
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  table.forget(made_by_other(1), {1, 8}, kOther);
  const auto found =
      table.receive_at_owner({0, made_by_other(1), {1, 9}, 0, 0}, kThird, thing(), table.effects);
  ASSERT_TRUE(found.refusal);
  EXPECT_EQ(found.refusal->why, Why::kReleased);
  EXPECT_EQ(table.counts().owners, 0u);
  ASSERT_FALSE(table.effects.messages.empty()) << "its parent is released";
  EXPECT_EQ(table.effects.messages.back().kind, RRefMessage::Kind::kChildAccept);
}

TEST(RRefTable, ReportsThatTheHolderOfAValueDied) {
  Table table;
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  EXPECT_FALSE(table.ask(made_by_other(1), {1, 9}, 1, kThird));
  table.forget(made_by_other(1), {1, 8}, kOther);
  table.depart(kThird, table.effects);
  EXPECT_EQ(table.effects.released.size(), 1u);
  const auto refusal = table.ask(made_by_other(1), {2, 9}, 1, kOther);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(*refusal, (Refusal{Why::kHolderDeparted, kThird, {}}));
}

TEST(RRefTable, FailsAnExpectedValueWhenItsCreatorDies) {
  Table table;
  const Keep waiting = thing();
  table.receive_at_owner({0, made_by_other(1), {1, 9}, 0, 0}, kThird, waiting, table.effects);
  EXPECT_EQ(table.counts().owners, 1u);
  table.depart(kOther, table.effects);
  ASSERT_EQ(table.effects.failed.size(), 1u);
  EXPECT_EQ(table.effects.failed[0].reference, waiting);
  EXPECT_EQ(table.effects.failed[0].why.why, Why::kCreatorDeparted);
  EXPECT_EQ(table.owned().creation_arrived(made_by_other(1), {1, 8}, thing()), nullptr)
      << "what still waited in the pool does not count";
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, ForgetsACreationThatItsCreatorGaveUp) {
  Table table;
  const Keep waiting = thing();
  table.receive_at_owner({0, made_by_other(1), {1, 9}, 0, 0}, kThird, waiting, table.effects);
  table.give_up(made_by_other(1), {1, 8}, kOther);
  ASSERT_EQ(table.effects.failed.size(), 1u);
  EXPECT_EQ(table.effects.failed[0].why, (Refusal{Why::kGivenUp, kOther, "late"}));
  EXPECT_EQ(table.owned().creation_arrived(made_by_other(1), {1, 8}, thing()), nullptr);
  EXPECT_EQ(table.ask(made_by_other(1), {1, 10}, 1, kThird)->text, "late");
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, CountsNothingForAWorkerThatIsGone) {
  Table table;
  const Keep owner = thing();
  table.depart(kThird, table.effects);
  EXPECT_FALSE(table.send_owner({0, 1}, owner, kThird));
  EXPECT_FALSE(table.send_user(owner, kThird));
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  EXPECT_EQ(table.ask(made_by_other(1), {1, 9}, 1, kThird)->why, Why::kSenderDeparted);
  table.join({kThird.rank, 1}, table.effects);
  EXPECT_EQ(table.ask(made_by_other(1), {1, 9}, 1, kThird)->why, Why::kSenderDeparted)
      << "it is another one now";
  EXPECT_TRUE(table.send_owner({0, 1}, owner, {kThird.rank, 1}));
  EXPECT_EQ(table.counts().forks, 2u);
}

TEST(RRefTable, TreatsAWorkerAsGoneWhenItsSuccessorJoins) {
  Table table;
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  table.join({kOther.rank, 1}, table.effects);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, AnswersACopyOfAForkRequestWithoutCountingItAgain) {
  Table table;
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  EXPECT_FALSE(table.ask(made_by_other(1), {1, 9}, 1, kThird));
  EXPECT_FALSE(table.ask(made_by_other(1), {1, 9}, 1, kThird));
  table.forget(made_by_other(1), {1, 9}, kThird);
  EXPECT_TRUE(table.ask(made_by_other(1), {1, 9}, 1, kThird)) << "a copy that comes after the deletion";
  EXPECT_EQ(table.counts().forks, 1u);
}

TEST(RRefTable, RejectsValuesOfAnEarlierIncarnation) {
  RRefTable table(0);
  RRefTable::Effects effects;
  table.begin({0, 3});
  table.join(kOther, effects);
  const auto found = table.receive_at_owner({0, made_by_other(1), {1, 9}, 0, 2}, kOther, thing(), effects);
  EXPECT_EQ(found.refusal->why, Why::kOtherOwner);
  const auto refusal = table.receive(
      {RRefMessage::Kind::kForkRequest, {0, 2}, made_by_other(1), {1, 9}, 1, {}}, kOther, effects);
  EXPECT_EQ(refusal->why, Why::kOtherOwner);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, WaitsForACreatorWhoseJoiningIsNotKnownYet) {
  RRefTable table(0);
  RRefTable::Effects effects;
  table.join(kThird, effects);
  const GlobalId value = made_by_other(1);
  EXPECT_FALSE(
      table.receive({RRefMessage::Kind::kForkRequest, kSelf, value, {1, 9}, 1, {}}, kThird, effects));
  table.join(kOther, effects);
  EXPECT_NE(table.owned().creation_arrived(value, {1, 8}, thing()), nullptr);
  EXPECT_EQ(table.counts().forks, 2u);
}

// remote() to the worker itself and the first use of its RRef are two messages to the worker itself, which
// may be served in either order. The use must find the reference that the creation will fill.
TEST(RRefTable, FindsAValueWhoseReferenceArrivedBeforeItsCreation) {
  Table table;
  const Keep owner = thing();
  const GlobalId value = table.next_value(0);
  table.owned().expect_own(value, owner);
  const auto fork = table.send_owner(value, owner, kSelf);
  EXPECT_EQ(table.receive_at_owner({0, value, *fork, 0, 0}, kSelf, thing(), table.effects).owner, owner);
  EXPECT_EQ(table.owned().find(value), owner);
  table.owned().own_creation_ended(value, table.effects);
  EXPECT_EQ(table.owned().find(value), nullptr);
  EXPECT_EQ(table.counts().owners, 0u);
}

TEST(RRefTable, TakesBackAChildWhoseMessageCouldNotBeSent) {
  Table table;
  const Keep parent = thing();
  const auto child = table.send_user(parent, kOther);
  EXPECT_EQ(table.counts().pending_children, 1u);
  table.unsend({2, {2, 1}, *child, 0, 0}, table.effects);
  table.effects.released.clear();
  EXPECT_EQ(parent.use_count(), 1);
}

TEST(RRefTable, TakesAForkBackFromItsHolderOnly) {
  Table table;
  table.owned().creation_arrived(made_by_other(1), {1, 8}, thing());
  for (const PeerId other : {kSelf, kThird, PeerId{1, 1}}) table.forget(made_by_other(1), {1, 8}, other);
  EXPECT_EQ(table.counts().forks, 1u);
  table.forget(made_by_other(1), {1, 8}, kOther);
  EXPECT_EQ(table.counts().forks, 0u);
}

TEST(RRefTable, ReleasesAParentForItsChildsReceiverOnly) {
  Table table;
  const auto child = table.send_user(thing(), kOther);
  const auto accept = [&](PeerId from) {
    table.receive({RRefMessage::Kind::kChildAccept, kSelf, {}, *child, 0, {}}, from, table.effects);
  };
  for (const PeerId other : {kSelf, kThird, PeerId{1, 1}}) accept(other);
  EXPECT_EQ(table.counts().pending_children, 1u);
  accept(kOther);
  EXPECT_EQ(table.counts().pending_children, 0u);
}

TEST(RRefTable, KeepsLittleStateOfReleasedValues) {
  Table table;
  for (std::uint64_t n = 1; n <= 100'000; ++n) {
    const GlobalId value = made_by_other(n), mine{1, 3 * n}, theirs{1, 3 * n + 1};
    table.owned().creation_arrived(value, mine, thing());
    table.ask(value, theirs, n, kThird);
    table.forget(value, mine, kOther);
    table.forget(value, theirs, kThird);
    if (n % 7 == 0) table.give_up(made_by_other(200'000 + n), {1, 3 * n + 2}, kOther);
    table.effects = {};
  }
  EXPECT_EQ(table.counts().owners, 0u);
  EXPECT_LT(table.counts().remembered, 100'000u / 7 + 300)
      << "numbers that never came are gaps, the rest is not";
  table.depart(kOther, table.effects);
  EXPECT_LT(table.counts().remembered, 300u);
  table.depart(kThird, table.effects);
  EXPECT_LE(table.counts().remembered, 256u);
}

}  // namespace
}  // namespace torchspan::rpc::rref_table_test
