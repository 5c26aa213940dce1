#include "rendezvous/store/store_fixture.h"

namespace torchspan::rendezvous::store_joins_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

Register visitor(const std::string& name, int rank = kAnyRank) {
  Register message = registration(rank, kOpenWorld);
  message.member.name = name;
  return message;
}

class OpenStore : public StoreFixture {
 protected:
  OpenStore() {
    open(kOpenWorld);
    say(0, registration(0, kOpenWorld));
  }
  /// The rank and incarnation that the store assigned to the worker which registered over `connection`.
  std::pair<int, std::uint32_t> place_of(ConnectionId connection, const std::string& name) const {
    for (const Welcome& welcome : heard<Welcome>(connection)) {
      for (const Member& member : welcome.members) {
        if (member.name == name) return {member.rank, member.incarnation};
      }
    }
    return {-7, 0};
  }
  using Place = std::pair<int, std::uint32_t>;
};

TEST_F(OpenStore, AdmitsRankZeroAtOnceAndOthersAsTheyConnect) {
  ASSERT_EQ(heard<Welcome>(0).size(), 1u);
  EXPECT_EQ(heard<Welcome>(0).at(0).members.size(), 1u);
  say(1, visitor("a"));
  say(2, visitor("b", 7));
  say(3, visitor("c"));
  EXPECT_EQ(place_of(1, "a"), Place(1, 0));
  EXPECT_EQ(place_of(2, "b"), Place(7, 0));
  EXPECT_EQ(place_of(3, "c"), Place(2, 0));
  const auto joined = heard<Joined>(0);
  ASSERT_EQ(joined.size(), 3u);
  EXPECT_EQ(joined[1].member.name, "b");
  EXPECT_EQ(joined[1].member.rank, 7);
  EXPECT_EQ(heard<Joined>(2).size(), 1u);
  EXPECT_TRUE(heard<Joined>(3).empty());
}

TEST_F(OpenStore, HoldsWorkersThatConnectBeforeRankZero) {
  open(kOpenWorld);
  sent_.clear();
  say(1, visitor("a"));
  say(2, visitor("b"));
  EXPECT_THROW(say(1, visitor("a")), Error);
  EXPECT_THROW(say(1, Leave{}), Error);
  store_->on_closed(2, closed(), kStart);
  EXPECT_TRUE(sent_.empty());
  say(0, registration(0, kOpenWorld));
  EXPECT_EQ(place_of(1, "a"), Place(1, 0));
  EXPECT_EQ(heard<Joined>(0).size(), 1u);
  EXPECT_TRUE(heard<Welcome>(2).empty());
}

TEST_F(OpenStore, RejectsNamesAndRanksThatAreInUse) {
  say(1, visitor("a", 3));
  say(2, visitor("a"));
  say(3, visitor("b", 3));
  say(4, visitor("worker0"));
  say(5, visitor("c", 0));
  for (ConnectionId connection : {2, 3}) {
    EXPECT_THAT(refusal(connection), AllOf(HasSubstr("taken by a (rank 3, pid 103"), HasSubstr("choose")));
    EXPECT_EQ(heard<Refused>(connection)[0].kind, ErrorKind::kInvalid);
  }
  EXPECT_THAT(refusal(4), HasSubstr("worker0 (rank 0"));
  EXPECT_THAT(refusal(5), HasSubstr("rank 0 is taken by worker0"));
  EXPECT_EQ(heard<Joined>(0).size(), 1u);
  EXPECT_TRUE(heard<Refused>(0).empty());
  say(6, visitor("b"));
  EXPECT_EQ(place_of(6, "b"), Place(1, 0));
}

TEST_F(OpenStore, GivesReturningWorkersTheirRankAndANewIncarnation) {
  say(1, visitor("a"));
  store_->on_closed(1, closed(), kStart);
  say(2, visitor("a"));
  EXPECT_EQ(place_of(2, "a"), Place(1, 1));
  EXPECT_EQ(heard<Joined>(0).back().member.incarnation, 1u);
  say(2, Leave{});
  say(3, visitor("a", 2));
  EXPECT_THAT(refusal(3), AllOf(HasSubstr("'a' requests rank 2"), HasSubstr("belongs to rank 1")));
  say(4, visitor("a", 1));
  EXPECT_EQ(place_of(4, "a"), Place(1, 2));
}

TEST_F(OpenStore, LetsANewNameRequestTheRankOfADepartedWorkerButNeverAssignsIt) {
  say(1, visitor("a"));
  store_->on_closed(1, closed(), kStart);
  say(2, visitor("b"));
  EXPECT_EQ(place_of(2, "b"), Place(2, 0)) << "rank 1 was used already";
  say(3, visitor("c", 1));
  EXPECT_EQ(place_of(3, "c"), Place(1, 1));
  say(4, visitor("a"));
  EXPECT_EQ(place_of(4, "a"), Place(3, 0)) << "no worker has the name a any more";
}

TEST_F(OpenStore, SendsNewWorkersTheDepartedOnesWithReasons) {
  say(1, visitor("a"));
  say(2, visitor("b"));
  store_->on_closed(1, closed(), kStart);
  say(2, Leave{});
  say(3, visitor("c"));
  ASSERT_EQ(heard<Welcome>(3).size(), 1u);
  const Welcome welcome = heard<Welcome>(3).at(0);
  EXPECT_EQ(welcome.members.size(), 4u);
  ASSERT_EQ(welcome.departed.size(), 2u);
  EXPECT_TRUE(welcome.departed[0].died);
  EXPECT_THAT(welcome.departed[0].how, HasSubstr("without a goodbye"));
  EXPECT_FALSE(welcome.departed[1].died);
}

TEST_F(OpenStore, ComparesFunctionsWithPresentWorkersOnly) {
  open(kOpenWorld);
  sent_.clear();
  Register lenient = registration(0, kOpenWorld), other = visitor("a");
  lenient.require_same_functions = other.require_same_functions = false;
  other.member.functions_digest = 1;
  other.functions = {"g()"};
  say(0, lenient);
  say(1, other);
  say(2, visitor("b"));
  EXPECT_THAT(refusal(2), AllOf(HasSubstr("only a (rank 1"), HasSubstr("has g()")));
  store_->on_closed(1, closed(), kStart);
  say(3, visitor("b"));
  EXPECT_EQ(place_of(3, "b"), Place(2, 0));
}

TEST_F(OpenStore, EndsWithRankZero) {
  say(1, visitor("a"));
  say(2, visitor("b"));
  say(0, Leave{});
  EXPECT_FALSE(store_->is_finished());
  say(3, visitor("c"));
  EXPECT_THAT(refusal(3), AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("ends with it")));
  EXPECT_EQ(heard<Refused>(3).at(0).kind, ErrorKind::kDisconnected);
  EXPECT_TRUE(heard<Refused>(3).at(0).passing);
  say(1, Leave{});
  EXPECT_FALSE(store_->is_finished());
  store_->on_closed(2, closed(), kStart);
  EXPECT_TRUE(store_->is_finished());
}

TEST_F(OpenStore, DoesNotMixWithFixedWorlds) {
  say(1, registration(1, 3));
  EXPECT_THAT(refusal(1), AllOf(HasSubstr("rank 0 serves an open world"), HasSubstr("worker1 (rank 1"),
                                HasSubstr("fixed world of 3")));
  open(2);
  sent_.clear();
  say(0, registration(0, 2));
  say(1, visitor("visitor"));
  EXPECT_THAT(refusal(1), AllOf(HasSubstr("fixed world of 2"), HasSubstr("visitor (no rank yet"),
                                HasSubstr("open world")));
  Register rankless = registration(kAnyRank, 2);
  say(2, rankless);
  EXPECT_THAT(refusal(2), HasSubstr("names no rank"));
  say(3, registration(1, 2));
  EXPECT_EQ(heard<Welcome>(0).size(), 1u) << "the gathering went on";
}

TEST_F(OpenStore, RestartsRoundNumbersWhenARankIsReplaced) {
  say(1, visitor("a"));
  say(2, visitor("b"));
  const auto come = [&](ConnectionId connection, std::uint64_t round, std::vector<std::uint32_t> incarnations,
                        const std::vector<int>& ranks = {0, 1, 2}) {
    sent_[connection].clear();
    say(connection, Contribute{round, "t", ranks, round, Duration::max(), {}, incarnations});
  };
  for (ConnectionId connection : {0, 1, 2}) come(connection, 0, {0, 0, 0});
  EXPECT_EQ(heard<Gathered>(2).size(), 1u);
  come(0, 1, {0, 0, 0});
  store_->on_closed(2, closed(), kStart);
  EXPECT_THAT(round_failure(0), HasSubstr("b (rank 2, pid 99 on node) died"));
  say(3, visitor("b"));
  come(1, 1, {0, 0, 0});
  EXPECT_THAT(round_failure(1), HasSubstr("b was replaced meanwhile; call again"));
  EXPECT_EQ(heard<RoundFailed>(1).at(0).kind, ErrorKind::kDisconnected);
  come(3, 0, {0, 0, 1});
  come(0, 0, {0, 0, 1});
  come(1, 0, {0, 0, 1});
  for (ConnectionId connection : {0, 1, 3}) EXPECT_EQ(heard<Gathered>(connection).size(), 1u);
  come(1, 0, {0, 2}, {1, 2});
  EXPECT_THAT(round_failure(1), HasSubstr("incarnation 2 of rank 2 is not known"));
  come(1, 0, {0}, {1, 2});
  EXPECT_THAT(round_failure(1), HasSubstr("1 incarnations of 2 ranks"));
  come(3, 0, {0, 0}, {1, 2});
  EXPECT_THAT(round_failure(3), HasSubstr("incarnation 0 of rank 2"));
}

TEST_F(StoreFixture, ReadmitsDepartedWorkersOfACompleteWorld) {
  gather_world(3);
  store_->on_closed(1, closed(), kStart);
  sent_.clear();
  Register other_name = registration(1, 3), other_size = registration(1, 4);
  other_name.member.name = "other";
  say(10, other_name);
  say(11, other_size);
  say(12, registration(2, 3));
  for (ConnectionId connection : {10, 11, 12}) EXPECT_THAT(refusal(connection), HasSubstr("is complete"));
  Register again = registration(1, 3);
  again.member.pid = 777;
  say(13, again);
  ASSERT_EQ(heard<Joined>(0).size(), 1u);
  EXPECT_EQ(heard<Joined>(2).at(0).member.incarnation, 1u);
  EXPECT_EQ(heard<Joined>(2).at(0).member.pid, 777);
  ASSERT_EQ(heard<Welcome>(13).size(), 1u);
  EXPECT_EQ(heard<Welcome>(13).at(0).members.at(1).incarnation, 1u);
  EXPECT_TRUE(heard<Welcome>(13).at(0).departed.empty());
  store_->on_closed(13, closed(), kStart);
  say(14, registration(1, 3));
  EXPECT_EQ(heard<Joined>(0).back().member.incarnation, 2u);
}

/// All workers leave a fixed world together, so a worker that registers again soon belongs to the next job.
TEST_F(StoreFixture, RejectsAWorkerThatReturnsAfterLeaving) {
  gather_world(3);
  sent_.clear();
  say(1, Leave{});
  say(10, registration(1, 3));
  EXPECT_THAT(refusal(10), AllOf(HasSubstr("worker1 (rank 1"), HasSubstr("this world is ending")));
  EXPECT_TRUE(heard<Refused>(10).at(0).passing);
  Register other = registration(1, 3);
  other.member.name = "other";
  say(11, other);
  EXPECT_THAT(refusal(11), HasSubstr("is complete"));
  EXPECT_FALSE(heard<Refused>(11).at(0).passing);
  EXPECT_TRUE(heard<Joined>(0).empty());
  say(0, Leave{});
  say(12, registration(2, 3));
  EXPECT_THAT(refusal(12), HasSubstr("worker0 (rank 0"));
  EXPECT_TRUE(heard<Refused>(12).at(0).passing);
}

class StoreOfHosts : public StoreFixture {
 protected:
  StoreOfHosts() {
    open(StoreOptions{2, "job", "here", {milliseconds(500), seconds(5)}, [this](const ClockSample& sample) {
                        samples_.push_back(sample);
                      }});
    Register near = registration(0, 2);
    near.member.host_id = "here";
    say(0, near);
    far_.member.host_id = "there";
    say(1, far_);
  }
  Register far_ = registration(1, 2);
  std::vector<ClockSample> samples_;
};

TEST_F(StoreOfHosts, AsksOtherHostsOnly) {
  store_->tick(kStart);
  store_->tick(kStart + milliseconds(500));
  EXPECT_EQ(heard<Ping>(1).size(), 2u);
  EXPECT_EQ(heard<Ping>(1).at(0).dead_after, seconds(5));
  EXPECT_TRUE(heard<Ping>(0).empty());
  say(1, Leave{});
  EXPECT_TRUE(store_->next_deadline().is_never());
}

TEST_F(StoreOfHosts, ReportsTheTimesOfAnsweredHeartbeats) {
  store_->tick(kStart + seconds(3));
  EXPECT_EQ(heard<Ping>(1).at(0).sent, kStart + seconds(3));
  say(1, Pong{kStart + seconds(3), kStart + seconds(70), kStart + seconds(71)}, kStart + seconds(5));
  ASSERT_EQ(samples_.size(), 1u);
  EXPECT_EQ(samples_[0].rank, 1);
  EXPECT_EQ(samples_[0].sent, kStart + seconds(3));
  EXPECT_EQ(samples_[0].received, kStart + seconds(70));
  EXPECT_EQ(samples_[0].answered, kStart + seconds(71));
  EXPECT_EQ(samples_[0].arrived, kStart + seconds(5));
  say(9, Pong{}, kStart);  // of a connection that has not registered
  EXPECT_EQ(samples_.size(), 1u);
}

TEST_F(StoreOfHosts, DeclaresSilentWorkersDeadOnceAndIgnoresThemAfterwards) {
  store_->tick(kStart);
  say(1, Pong{}, kStart + seconds(4));
  store_->tick(kStart + seconds(4));
  store_->tick(kStart + milliseconds(8999));
  EXPECT_TRUE(heard<Died>(0).empty());
  store_->tick(kStart + seconds(9));
  ASSERT_EQ(heard<Died>(0).size(), 1u);
  EXPECT_EQ(heard<Died>(0).at(0).how,
            " died: silent for 5.0 s (no heartbeat); its process is "
            "stopped, or its host or the network "
            "is down");
  EXPECT_EQ(heard<DeclaredDead>(1).size(), 1u);
  EXPECT_EQ(closed_, std::vector<ConnectionId>{1});
  say(1, Pong{});
  say(1, Contribute{0, "t", {0, 1}, 0, Duration::max(), {}});
  EXPECT_TRUE(heard<RoundFailed>(1).empty());
  store_->on_closed(1, closed(), kStart);
  EXPECT_EQ(heard<Died>(0).size(), 1u);
  say(2, far_);
  EXPECT_EQ(heard<Joined>(0).at(0).member.incarnation, 1u);
}

TEST_F(StoreOfHosts, ReportsASilenceThatTheTransportNoticedFirst) {
  store_->on_closed(1, closed().with_elapsed(seconds(5)), kStart);
  EXPECT_EQ(heard<Died>(0).at(0).how,
            " died: silent for 5.0 s (no heartbeat); its process is "
            "stopped, or its "
            "host or the network is down");
}

TEST_F(StoreOfHosts, AnyMessageIsASignOfLife) {
  store_->tick(kStart);
  say(1, Contribute{0, "t", {1}, 0, Duration::max(), {}}, kStart + seconds(4));
  store_->tick(kStart + seconds(5));
  EXPECT_TRUE(heard<Died>(0).empty());
}

TEST_F(StoreOfHosts, FailsAGatheringWithASilentWorker) {
  open(StoreOptions{3, "job", "here", {milliseconds(500), seconds(5)}});
  Register near = registration(0, 3), far = registration(1, 3);
  near.member.host_id = "here";
  far.member.host_id = "there";
  say(0, near);
  say(1, far);
  sent_.clear();
  store_->tick(kStart);
  store_->tick(kStart + seconds(5));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr("worker1"), HasSubstr("silent for 5.0 s")));
}

}  // namespace
}  // namespace torchspan::rendezvous::store_joins_test
