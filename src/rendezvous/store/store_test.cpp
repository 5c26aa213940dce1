#include <algorithm>
#include <random>
#include <set>

#include "rendezvous/store/store_fixture.h"

namespace torchspan::rendezvous::store_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(StoreFixture, WelcomesAllWorkersByRankOnceTheWorldIsComplete) {
  open(3);
  say(10, registration(2, 3));
  say(11, registration(0, 3));
  EXPECT_TRUE(sent_.empty());
  say(12, registration(1, 3));
  for (ConnectionId connection : {10, 11, 12}) {
    const auto welcomes = heard<Welcome>(connection);
    ASSERT_EQ(welcomes.size(), 1u);
    ASSERT_EQ(welcomes[0].members.size(), 3u);
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(welcomes[0].members[static_cast<std::size_t>(rank)].rank, rank);
  }
}

TEST_F(StoreFixture, NamesTheMissingWorkersToAllAtTheFirstDeadline) {
  open(4);
  Register impatient = registration(1, 4);
  impatient.timeout = std::chrono::seconds(5);
  say(1, impatient);
  say(0, registration(0, 4));
  EXPECT_EQ(store_->next_deadline(), Deadline(kStart + std::chrono::seconds(5)));
  store_->tick(kStart + std::chrono::seconds(4));
  EXPECT_TRUE(sent_.empty());
  store_->tick(kStart + std::chrono::seconds(5));
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(refusal(connection),
                AllOf(HasSubstr("2 of 4"), HasSubstr("missing: rank 2, 3"),
                      HasSubstr("worker0 (rank 0, pid 100 on node)"), HasSubstr("worker1")));
    EXPECT_EQ(heard<Refused>(connection).at(0).kind, ErrorKind::kTimedOut);
  }
  EXPECT_FALSE(store_->is_finished());
  store_->on_closed(0, closed(), kStart);
  store_->on_closed(1, closed(), kStart);
  EXPECT_TRUE(store_->is_finished());
}

TEST_F(StoreFixture, NamesBothWorkersOfOneName) {
  open(3);
  say(0, registration(0, 3));
  Register twin = registration(1, 3);
  twin.member.name = "worker0";
  say(1, twin);
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(refusal(connection), AllOf(HasSubstr("two workers are named 'worker0'"),
                                           HasSubstr("rank 0, pid 100"), HasSubstr("rank 1, pid 101")));
  }
  say(2, registration(2, 3));
  EXPECT_THAT(refusal(2), HasSubstr("two workers are named"));
}

TEST_F(StoreFixture, NamesBothWorkersOfOneRank) {
  open(3);
  say(0, registration(1, 3));
  Register twin = registration(1, 3);
  twin.member.name = "other";
  twin.member.pid = 555;
  say(1, twin);
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(refusal(connection),
                AllOf(HasSubstr("two workers have rank 1"), HasSubstr("worker1 (rank 1, pid 101"),
                      HasSubstr("other (rank 1, pid 555")));
  }
}

TEST_F(StoreFixture, NamesTheWorldSizeOfEachWorker) {
  open(3);
  say(0, registration(0, 3));
  say(1, registration(3, 5));
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(refusal(connection), AllOf(HasSubstr("worker3"), HasSubstr("WORLD_SIZE is 5"),
                                           HasSubstr("says 3"), HasSubstr("worker0")));
  }
}

TEST_F(StoreFixture, ListsTheFunctionsThatDiffer) {
  open(2);
  Register first = registration(0, 2), second = registration(1, 2);
  first.member.functions_digest = 1;
  first.functions = {"f()", "g(int)"};
  second.member.functions_digest = 2;
  second.functions = {"f()", "g(float)"};
  say(0, first);
  say(1, second);
  EXPECT_THAT(refusal(0), AllOf(HasSubstr("only worker0 (rank 0, pid 100 on node) has g(int)"),
                                HasSubstr("only worker1 (rank 1, pid 101 on node) has g(float)")));
  EXPECT_THAT(refusal(0), ::testing::Not(HasSubstr("f()")));
}

TEST_F(StoreFixture, SaysToAThirdWorkerWhichTwoHaveDifferentFunctions) {
  open(3);
  Register without = registration(1, 3);
  without.member.functions_digest = 2;
  without.functions = {};
  say(0, registration(0, 3));
  say(1, without);
  say(2, registration(2, 3));
  EXPECT_THAT(refusal(2),
              HasSubstr("differ: of worker0 (rank 0, pid 100 on node) and worker1 (rank 1, pid 101 on "
                        "node), only worker0 (rank 0, pid 100 on node) has f(); start"));
}

TEST_F(StoreFixture, AllowsDifferentFunctionsWhenBothDo) {
  open(2);
  Register first = registration(0, 2), second = registration(1, 2);
  second.member.functions_digest = 2;
  first.require_same_functions = second.require_same_functions = false;
  say(0, first);
  say(1, second);
  EXPECT_EQ(heard<Welcome>(0).size(), 1u);
}

TEST_F(StoreFixture, RefusesASignatureThatChangedAlsoWhenDifferencesAreAllowed) {
  open(2);
  Register first = registration(0, 2), second = registration(1, 2);
  second.member.functions_digest = 2;
  first.require_same_functions = second.require_same_functions = false;
  first.functions = {"f () -> int64", "g (int64) -> int64"};
  second.functions = {"g (float64) -> int64", "h () -> int64"};
  say(0, first);
  say(1, second);
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(
        refusal(connection),
        AllOf(HasSubstr("'g'"), HasSubstr("worker0 (rank 0, pid 100 on node) has 'g (int64) -> int64'"),
              HasSubstr("worker1 (rank 1, pid 101 on node) has 'g (float64) -> int64'"),
              HasSubstr("give the new signature a new name")));
  }
}

TEST_F(StoreFixture, FailsAWorldWhoseWorkersHaveNoWireVersionInCommon) {
  open(3);
  Register first = registration(0, 3), second = registration(1, 3), third = registration(2, 3);
  first.member.wire = {1, 1, 0};
  second.member.wire = {1, 2, 0};
  third.member.wire = {2, 2, 0};
  say(0, first);
  say(1, second);
  say(2, third);
  for (ConnectionId connection : {0, 1, 2}) {
    EXPECT_THAT(
        refusal(connection),
        AllOf(HasSubstr("worker0 (rank 0, pid 100 on node) speaks version 1 of the wire format"),
              HasSubstr("worker2 (rank 2, pid 102 on node) speaks version 2"), HasSubstr("neighboring")));
    EXPECT_EQ(heard<Refused>(connection).at(0).kind, ErrorKind::kUnsupported);
  }
}

TEST_F(StoreFixture, ReadsWhatANeighborOfTheNextVersionAdds) {
  StoreOptions options{2, "job"};
  open(options);
  const auto longer = [](Bytes bytes) {
    bytes.insert(bytes.end(), 4, std::byte{0xEE});
    return bytes;
  };
  Register first = registration(0, 2), second = registration(1, 2);
  second.versions = {kStoreProtocol.newest, kStoreProtocol.newest + 1, 0};
  say(0, first);
  store_->on_message(1, longer(encode_message(second)), kStart);
  ASSERT_EQ(heard<Welcome>(1).size(), 1u);
  EXPECT_EQ(heard<Welcome>(1).at(0).versions, kStoreProtocol);
  const Contribute contribute{1, "tag", {0, 1}, 0, Duration::max(), {}, {0, 0}};
  say(0, contribute);
  store_->on_message(1, longer(encode_message(contribute)), kStart);
  EXPECT_EQ(heard<Gathered>(0).size(), 1u);
  ByteWriter unknown;
  unknown.put(std::uint16_t{999});
  EXPECT_NO_THROW(store_->on_message(1, unknown.bytes(), kStart));
  EXPECT_THROW(store_->on_message(0, unknown.bytes(), kStart), Error) << "worker0 is not newer";
  EXPECT_THROW(store_->on_message(0, longer(encode_message(contribute)), kStart), Error);
}

TEST_F(StoreFixture, NamesARefusedVersionWhenTheWorldStaysIncomplete) {
  open(2);
  Register first = registration(0, 2), second = registration(1, 2);
  second.versions = {5, 5, 0};
  say(0, first);
  say(1, second);
  EXPECT_EQ(heard<Refused>(1).at(0).kind, ErrorKind::kUnsupported);
  store_->tick(kStart + std::chrono::seconds(61));
  EXPECT_THAT(refusal(0), AllOf(HasSubstr("missing: rank 1"), HasSubstr("a worker was refused meanwhile"),
                                HasSubstr("speaks version 5"), HasSubstr("rank 0 speaks version 1")));
}

TEST_F(StoreFixture, RejectsUnknownPeersWithoutHarmToTheWorld) {
  open(2);
  say(0, registration(0, 2));
  Register unauthenticated_peer = registration(1, 2);
  unauthenticated_peer.job = "other job";
  say(7, unauthenticated_peer);
  EXPECT_THAT(refusal(7), AllOf(HasSubstr("'job'"), HasSubstr("'other job'"), HasSubstr("MASTER_PORT")));
  Register old = registration(1, 2);
  old.versions = {76, 77, 0};
  say(8, old);
  EXPECT_THAT(refusal(8), AllOf(HasSubstr("versions 76 to 77"), HasSubstr("rank 0 speaks version 1"),
                                HasSubstr("neighboring")));
  Register nameless = registration(1, 2);
  nameless.member.name = "a b";
  say(9, nameless);
  EXPECT_EQ(heard<Refused>(9).size(), 1u);
  say(1, registration(1, 2));
  EXPECT_EQ(heard<Welcome>(0).size(), 1u);
  say(10, registration(1, 2));
  EXPECT_THAT(refusal(10), HasSubstr("world of 2 workers is complete"));
}

TEST_F(StoreFixture, FailsTheWorldWhenAWorkerDiesWhileItGathers) {
  open(3);
  say(0, registration(0, 3));
  say(1, registration(1, 3));
  store_->on_closed(1, closed(), kStart);
  EXPECT_THAT(refusal(0),
              AllOf(HasSubstr("worker1 (rank 1, pid 101 on node) died"), HasSubstr("without a goodbye")));
}

TEST_F(StoreFixture, AnnouncesDeathsAndDeparturesToTheOthers) {
  gather_world(3);
  store_->on_closed(1, closed(), kStart);
  for (ConnectionId connection : {0, 2}) {
    ASSERT_EQ(heard<Died>(connection).size(), 1u);
    EXPECT_EQ(heard<Died>(connection).at(0).rank, 1);
  }
  EXPECT_TRUE(heard<Died>(1).empty());
  say(2, Leave{});
  EXPECT_EQ(heard<Farewell>(2).size(), 1u);
  EXPECT_EQ(heard<Left>(0).size(), 1u);
  store_->on_closed(2, closed(), kStart);
  EXPECT_EQ(heard<Died>(0).size(), 1u);
  EXPECT_FALSE(store_->is_finished());
  say(0, Leave{});
  EXPECT_TRUE(store_->is_finished());
}

TEST_F(StoreFixture, RejectsMessagesBeforeTheWelcome) {
  open(2);
  EXPECT_THROW(say(0, Leave{}), Error);
  EXPECT_THROW(say(0, Contribute{0, "t", {0}, 0, Duration::max(), {}}), Error);
  say(0, registration(0, 2));
  EXPECT_THROW(say(0, Leave{}), Error);
  EXPECT_THROW(say(0, registration(0, 2)), Error);
  EXPECT_THROW(say(0, Farewell{}), Error);
}

TEST_F(StoreFixture, GathersBytesInTheOrderOfRanks) {
  gather_world(3);
  say(2, Contribute{0, "t", {0, 2}, 0, Duration::max(), {std::byte{2}}});
  EXPECT_TRUE(sent_.empty());
  say(0, Contribute{0, "t", {0, 2}, 0, Duration::max(), {std::byte{7}}});
  for (ConnectionId connection : {0, 2}) {
    const auto gathered = heard<Gathered>(connection);
    ASSERT_EQ(gathered.size(), 1u);
    EXPECT_EQ(gathered[0].all(2), (std::vector<Bytes>{{std::byte{7}}, {std::byte{2}}}));
  }
  EXPECT_TRUE(heard<Gathered>(1).empty());
}

TEST_F(StoreFixture, NamesTheRankThatARoundMisses) {
  gather_world(3);
  say(0, Contribute{0, "t", {0, 1, 2}, 0, std::chrono::seconds(3), {}});
  say(1, Contribute{0, "t", {0, 1, 2}, 0, std::chrono::seconds(2), {}});
  EXPECT_EQ(store_->next_deadline(), Deadline(kStart + std::chrono::seconds(2)));
  store_->tick(kStart + std::chrono::seconds(2));
  for (ConnectionId connection : {0, 1}) {
    EXPECT_THAT(round_failure(connection),
                HasSubstr("without worker2 (rank 2, pid 102 on node); there: worker0"));
  }
  say(2, Contribute{0, "t", {0, 1, 2}, 0, Duration::max(), {}});
  EXPECT_THAT(round_failure(2),
              HasSubstr("without this worker, worker2 (rank 2, pid 102 on node); there: worker0"));
  EXPECT_TRUE(store_->next_deadline().is_never());
}

TEST_F(StoreFixture, ListsTheRanksThatHaveNotJoinedARound) {
  gather_world(4);
  say(0, Contribute{7, "t", {0, 1, 2, 3}, 0, Duration::max(), {}});
  say(2, Contribute{5, "t", {0, 1, 2, 3}, 0, Duration::max(), {}});
  say(0, AskMissing{7});
  say(0, AskMissing{5});  // another member's round, or none
  ASSERT_EQ(heard<Missing>(0).size(), 1u);
  EXPECT_EQ(heard<Missing>(0)[0].call, 7u);
  EXPECT_EQ(heard<Missing>(0)[0].ranks, (std::vector<int>{1, 3}));
  EXPECT_TRUE(heard<Missing>(2).empty());
  store_->on_closed(1, closed(), kStart);
  say(0, AskMissing{7});
  EXPECT_EQ(heard<Missing>(0).size(), 1u) << "the round has ended";
}

TEST_F(StoreFixture, ReportsAtOnceWhyAWorkerGaveUp) {
  gather_world(3);
  say(1, GiveUp{"left because of a cold"});
  EXPECT_EQ(heard<Farewell>(1).size(), 1u);
  for (ConnectionId connection : {0, 2}) {
    ASSERT_EQ(heard<Died>(connection).size(), 1u);
    EXPECT_EQ(heard<Died>(connection)[0].how, " left because of a cold");
  }
  store_->on_closed(1, closed(), kStart);
  EXPECT_EQ(heard<Died>(0).size(), 1u);
  say(0, Contribute{0, "t", {0, 1}, 0, Duration::max(), {}});
  EXPECT_EQ(round_failure(0), "worker1 (rank 1, pid 101 on node) left because of a cold");
}

TEST_F(StoreFixture, BlamesTheFirstDeathAndNotTheLowestRank) {
  gather_world(4);
  store_->on_closed(3, closed(), kStart);
  store_->on_closed(1, closed(), kStart);
  say(0, Contribute{0, "t", {0, 1, 2, 3}, 0, Duration::max(), {}});
  EXPECT_THAT(round_failure(0), HasSubstr("worker3 (rank 3, pid 103 on node) died"));
}

TEST_F(StoreFixture, FailsRoundsOfDeadAndDepartedWorkers) {
  gather_world(4);
  say(0, Contribute{0, "t", {0, 1}, 0, Duration::max(), {}});
  say(2, Contribute{0, "u", {1, 2}, 0, Duration::max(), {}});
  say(3, Contribute{0, "v", {0, 3}, 0, Duration::max(), {}});
  store_->on_closed(1, closed(), kStart);
  EXPECT_THAT(round_failure(0), HasSubstr("worker1 (rank 1, pid 101 on node) died"));
  EXPECT_THAT(round_failure(2), HasSubstr("worker1 (rank 1, pid 101 on node) died"));
  EXPECT_TRUE(heard<RoundFailed>(3).empty());
  say(2, Leave{});
  say(3, Contribute{0, "w", {2, 3}, 0, Duration::max(), {}});
  EXPECT_THAT(round_failure(3), HasSubstr("left the world"));
  say(0, Contribute{0, "v", {0, 3}, 0, Duration::max(), {}});
  EXPECT_EQ(heard<Gathered>(3).size(), 1u);
}

TEST_F(StoreFixture, KeepsTheRoundsOfDifferentRanksApart) {
  gather_world(3);
  say(0, Contribute{1, "t", {0, 1}, 0, std::chrono::seconds(1), {}});
  say(2, Contribute{2, "t", {0, 1, 2}, 0, std::chrono::seconds(9), {}});
  say(1, Contribute{3, "t", {0, 1}, 0, Duration::max(), {}});
  ASSERT_EQ(heard<Gathered>(0).size(), 1u);
  EXPECT_EQ(heard<Gathered>(0).at(0).call, 1u);
  ASSERT_EQ(heard<Gathered>(1).size(), 1u);
  EXPECT_EQ(heard<Gathered>(1).at(0).call, 3u);
  EXPECT_TRUE(heard<Gathered>(2).empty());
}

TEST_F(StoreFixture, ReportsThatTheMissingWorkerNamedOtherRanks) {
  gather_world(3);
  say(0, Contribute{0, "t", {0, 1}, 0, std::chrono::seconds(1), {}});
  say(1, Contribute{0, "t", {0, 1, 2}, 0, Duration::max(), {}});
  store_->tick(kStart + std::chrono::seconds(1));
  EXPECT_THAT(round_failure(0),
              AllOf(HasSubstr("without worker1"), HasSubstr("[0, 1, 2] instead of [0, 1]")));
  EXPECT_TRUE(heard<RoundFailed>(1).empty());
}

TEST_F(StoreFixture, RejectsInvalidContributions) {
  gather_world(2);
  const std::vector<Contribute> bad = {{0, "t", {1}, 0, Duration::max(), {}},
                                       {0, "t", {}, 0, Duration::max(), {}},
                                       {0, "t", {1, 0}, 0, Duration::max(), {}},
                                       {0, "t", {0, 0}, 0, Duration::max(), {}},
                                       {0, "t", {0, 2}, 0, Duration::max(), {}},
                                       {0, "a b", {0}, 0, Duration::max(), {}},
                                       {0, "t", {0}, 0, Duration::max(), Bytes(kMostGatherBytes + 1)}};
  for (const Contribute& message : bad) {
    sent_.clear();
    say(0, message);
    ASSERT_EQ(heard<RoundFailed>(0).size(), 1u);
    EXPECT_EQ(heard<RoundFailed>(0).at(0).kind, ErrorKind::kInvalid);
  }
}

TEST_F(StoreFixture, AddsUpCountsAndSendsTheFirstNotes) {
  constexpr int kSize = 20;
  gather_world(kSize);
  std::vector<int> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(rank);
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_TRUE(sent_.empty());
    Contribute message{7, "t", ranks, 0, Duration::max(), {}};
    if (rank != 1) message.bytes = {static_cast<std::byte>(rank)};
    message.counts = {1, static_cast<std::uint64_t>(rank)};
    say(static_cast<ConnectionId>(rank), message);
  }
  for (int rank = 0; rank < kSize; ++rank) {
    const auto summed = heard<Summed>(static_cast<ConnectionId>(rank));
    ASSERT_EQ(summed.size(), 1u);
    EXPECT_EQ(summed[0].call, 7u);
    EXPECT_EQ(summed[0].sums.counts, (std::vector<std::uint64_t>{20, 190}));
    EXPECT_EQ(summed[0].sums.noted, 19u);
    ASSERT_EQ(summed[0].sums.notes.size(), CountSums::kMostNotes);
    EXPECT_EQ(summed[0].sums.notes[1].rank, 2);
    EXPECT_EQ(summed[0].sums.notes[1].bytes, Bytes{std::byte{2}});
  }
}

TEST_F(StoreFixture, RefusesCountsOfAnotherNumberAndKeepsTheRound) {
  gather_world(2);
  const auto counts = [](std::vector<std::uint64_t> numbers) {
    Contribute message{0, "t", {0, 1}, 0, Duration::max(), {}};
    message.counts = std::move(numbers);
    return message;
  };
  say(0, counts({1, 2}));
  say(1, counts({1}));
  EXPECT_THAT(round_failure(1), AllOf(HasSubstr("1 counts"), HasSubstr("have 2")));
  say(1, counts(std::vector<std::uint64_t>(kMostCounts + 1)));
  EXPECT_EQ(heard<RoundFailed>(1).size(), 2u);
  say(1, Contribute{0, "t", {0, 1}, 0, Duration::max(), {}});  // a gather is another round
  EXPECT_TRUE(heard<Summed>(0).empty());
  say(1, counts({3, 4}));
  EXPECT_EQ(heard<Summed>(0).at(0).sums.counts, (std::vector<std::uint64_t>{4, 6}));
}

/// In any order of contributions, deaths, replacements, news of them, and deadlines, every participant of a
/// round gets its result exactly once, and nothing is kept once all have ended.
TEST_F(StoreFixture, EndsEveryRoundOnceWhateverHappens) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int size = 2 + static_cast<int>(random() % 4);
    std::map<int, std::map<std::uint64_t, int>> asked, answered;  // by rank, then call
    std::set<int> alive;
    Rounds rounds([&](int rank, const SharedBytes& bytes) {
      EXPECT_TRUE(alive.contains(rank)) << "an answer to a dead worker";
      ByteReader reader(*bytes);
      const auto type = reader.get<std::uint16_t>();
      EXPECT_TRUE(type == Gathered::kType || type == RoundFailed::kType);
      ++answered[rank][reader.get<std::uint64_t>()];
    });
    const auto count = static_cast<std::size_t>(size);
    std::vector<std::uint32_t> latest(count, 0);
    std::vector<std::vector<std::uint32_t>> believed(count,
                                                     latest);  // the incarnations that each worker knows
    std::vector<std::map<std::pair<std::string, std::vector<std::uint32_t>>, std::uint64_t>> next(count);
    for (int rank = 0; rank < size; ++rank) {
      rounds.on_join(registration(rank, size).member);
      alive.insert(rank);
    }
    TimePoint now{};
    for (int step = 0; step < 60; ++step) {
      const int rank = static_cast<int>(random() % count);
      const auto self = static_cast<std::size_t>(rank);
      now += std::chrono::milliseconds(random() % 5);
      if (random() % 40 == 0) {
        if (alive.erase(rank) == 1) rounds.on_departed(rank, "gone");
      } else if (!alive.contains(rank) && random() % 4 == 0) {
        Member again = registration(rank, size).member;
        again.incarnation = ++latest[self];
        rounds.on_join(again);
        alive.insert(rank);
        believed[self] = latest;
        asked[rank].clear();
        answered[rank].clear();
      } else if (random() % 8 == 0) {
        believed[self] = latest;
      } else if (random() % 10 == 0) {
        rounds.tick(now);
      } else if (alive.contains(rank)) {
        const std::string tag(1, static_cast<char>('a' + random() % 2));
        std::vector<int> ranks;
        for (int other = 0; other < size; ++other) {
          if (other == rank || tag == "a" || other % 2 == rank % 2) ranks.push_back(other);
        }
        std::vector<std::uint32_t> incarnations;
        for (const int other : ranks) incarnations.push_back(believed[self][static_cast<std::size_t>(other)]);
        const std::uint64_t round = next[self][{tag, incarnations}]++;
        const auto call = static_cast<std::uint64_t>(step);
        ++asked[rank][call];
        rounds.contribute(
            rank, {call, tag, ranks, round, std::chrono::milliseconds(1 + random() % 100), {}, incarnations},
            now);
      }
    }
    rounds.tick(now + std::chrono::seconds(1));
    for (const int rank : alive) EXPECT_EQ(answered[rank], asked[rank]) << "rank " << rank;
    while (!alive.empty()) rounds.on_departed(alive.extract(alive.begin()).value(), "gone");
    EXPECT_EQ(rounds.size(), 0u);
  }
}

}  // namespace
}  // namespace torchspan::rendezvous::store_test
