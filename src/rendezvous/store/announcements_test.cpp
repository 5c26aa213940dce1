#include "rendezvous/store/roster.h"
#include "rendezvous/store/store_fixture.h"

namespace torchspan::rendezvous::announcements_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/// A complete world of a store that batches its announcements.
class BatchingStore : public StoreFixture {
 protected:
  void gather_batching_world(int size) {
    open_with(StoreOptions{size, "job"});
    for (int rank = 0; rank < size; ++rank) say(static_cast<ConnectionId>(rank), registration(rank, size));
    sent_.clear();
  }
};

TEST_F(BatchingStore, AnnouncesTheFirstChangeAtOnceAndABurstInOneMessage) {
  gather_batching_world(100);
  store_->on_closed(99, closed(), kStart);
  EXPECT_EQ(store_->next_deadline(), Deadline(TimePoint::min())) << "nothing was announced before";
  store_->tick(kStart);
  EXPECT_EQ(heard<Died>(0).size(), 1u);
  for (ConnectionId connection = 90; connection < 99; ++connection)
    store_->on_closed(connection, closed(), kStart);
  say(89, Leave{});
  store_->tick(kStart);
  EXPECT_EQ(sent_[0].size(), 1u);
  const Deadline due = store_->next_deadline();
  EXPECT_EQ(due, Deadline(kStart + microseconds(10) * 99));
  store_->tick(due.at());
  EXPECT_EQ(sent_[0].size(), 2u) << "one message for ten changes";
  EXPECT_LT(sent_[0].back().size(), 200u) << "nine deaths with one reason";
  EXPECT_EQ(heard<Died>(0).size(), 10u);
  EXPECT_EQ(heard<Died>(0).back().rank, 98);
  EXPECT_EQ(heard<Left>(0).size(), 1u);
  EXPECT_TRUE(store_->next_deadline().is_never());
}

TEST_F(BatchingStore, AnnouncesAChangeBeforeTheRoundThatFailsBecauseOfIt) {
  gather_batching_world(3);
  store_->on_closed(2, closed(), kStart);
  store_->tick(kStart);  // announces it, and the next one later
  say(0, Contribute{1, "t", {0, 1}, 0, Duration::max(), {}});
  store_->on_closed(1, closed(), kStart);
  ASSERT_EQ(sent_[0].size(), 3u);
  ByteReader first(sent_[0][1]), second(sent_[0][2]);
  EXPECT_EQ(first.get<std::uint16_t>(), Changes::kType);
  EXPECT_EQ(second.get<std::uint16_t>(), RoundFailed::kType);
  EXPECT_EQ(heard<Died>(0).size(), 2u);
  store_->tick(kStart + milliseconds(100));
  EXPECT_EQ(sent_[0].size(), 3u) << "each change once";
}

TEST_F(BatchingStore, SendsANewWorkerOnlyTheChangesAfterItsWelcome) {
  gather_batching_world(4);
  store_->on_closed(1, closed(), kStart);
  store_->tick(kStart);
  store_->on_closed(2, closed(), kStart);
  say(11, registration(1, 4));
  ASSERT_EQ(heard<Welcome>(11).size(), 1u);
  EXPECT_EQ(heard<Welcome>(11).at(0).departed.at(0).ranks, std::vector<int>{2});
  store_->on_closed(3, closed(), kStart);
  store_->tick(kStart + milliseconds(1));
  ASSERT_EQ(heard<Died>(11).size(), 1u);
  EXPECT_EQ(heard<Died>(11).at(0).rank, 3);
  ASSERT_EQ(heard<Joined>(0).size(), 1u);
  EXPECT_EQ(heard<Joined>(0).at(0).member.incarnation, 1u);
  EXPECT_EQ(heard<Died>(0).size(), 3u);
}

/// Rank 0 ends because another worker died, and the store with it: the others must know of both.
TEST_F(BatchingStore, AnnouncesEveryDeathBeforeItEndsWithRank0) {
  gather_batching_world(4);
  store_->on_closed(3, closed(), kStart);
  store_->tick(kStart);  // announces it, and the next one later
  store_->on_closed(1, closed(), kStart);
  EXPECT_EQ(heard<Died>(2).size(), 1u);
  say(0, GiveUp{"left because its call failed"});
  const auto deaths = heard<Died>(2);
  ASSERT_EQ(deaths.size(), 3u);
  EXPECT_EQ(deaths[1].rank, 1);
  EXPECT_EQ(deaths[2].rank, 0);
  EXPECT_EQ(deaths[2].how, " left because its call failed");
  EXPECT_EQ(heard<Farewell>(0).size(), 1u);
}

TEST(StoreOrder, Rank0HearsOfADeathLast) {
  std::vector<ConnectionId> heard;
  Store store({4, "job"},
              {.send = [&](ConnectionId connection, const SharedBytes&) { heard.push_back(connection); },
               .close = [](ConnectionId) {}});
  for (int rank = 0; rank < 4; ++rank)
    store.on_message(static_cast<ConnectionId>(rank), encode_message(registration(rank, 4)), kStart);
  heard.clear();
  store.on_closed(1, Error(ErrorKind::kDisconnected, "end of file"), kStart);
  store.tick(kStart);
  EXPECT_EQ(heard, (std::vector<ConnectionId>{3, 2, 0}));
}

TEST_F(BatchingStore, WaitsAtMostFiftyMillisecondsHoweverLargeTheWorld) {
  Announcements announcements{{}};
  announcements.add(Departed{{1}});
  announcements.all_sent(kStart, 1 << 20);
  announcements.add(Departed{{2}});
  EXPECT_FALSE(announcements.due(kStart + milliseconds(49)));
  EXPECT_TRUE(announcements.due(kStart + milliseconds(50)));
}

}  // namespace
}  // namespace torchspan::rendezvous::announcements_test
