#include "collective/shm/op_queue.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::collective::shm::op_queue_test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int kRanks = 2;
constexpr std::uint64_t kArena = std::uint64_t{16} << 20;

/// How an operation ended on a rank.
struct Ending {
  std::atomic<bool> known{false};
  std::string failure = {};  ///< empty: it succeeded
};

/// The queues of two ranks in this process.
class OpQueueTest : public ::testing::Test {
 protected:
  OpQueueTest() {
    const std::string address = "unix:" + folder_.path();
    rendezvous::MembershipOptions options;
    options.name = "worker0";
    options.store_address = address + "/store";
    options.address = address + "/worker0";
    membership_ = rendezvous::Membership::join(
        *runtime_, rendezvous::stream_transports(*executor_, net::Secret::random()), options);
    const auto link = WorldLink::make(runtime_, *membership_);
    std::vector<std::shared_ptr<Arena>> arenas;
    for (int rank = 0; rank < kRanks; ++rank) arenas.push_back(Arena::make(kArena));
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<PeerIdentity> peers = {{0, 1, "worker0"}, {1, 2, "worker1"}};
      memories_.push_back(std::make_shared<PeerMemory>(link, peers, rank, arenas[rank]));
      const int other = 1 - rank;
      memories_.back()->add_peer(other,
                                 map_arena(Descriptor(::dup(arenas[other]->descriptor().get())), kArena));
    }
    std::vector<Bytes> places(kRanks);
    std::atomic<int> there{0};
    queues_.resize(kRanks);
    std::vector<Thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(executor_->spawn("rank", [&, rank] {
        const GatherBytes gather = [&](BytesView mine) {
          places[rank].assign(mine.begin(), mine.end());
          ++there;
          while (there < kRanks) executor_->sleep(std::chrono::milliseconds(1));
          return places;
        };
        queues_[rank] =
            OpQueue::make(GroupMemory::make(memories_[rank], {0, 1}, gather, {0, 1}), seconds(60));
      }));
    }
  }

  /// Submits an operation of `verb` to a rank. `begin` runs on the thread that drives the queue.
  std::shared_ptr<Ending> submit(
      int rank, const Call& call, std::function<void()> begin = [] {}) {
    const auto ending = std::make_shared<Ending>();
    auto operation = std::make_unique<Operation>();
    operation->call = call;
    operation->begin = [begin = std::move(begin)] {
      begin();
      return OpCoroutine();
    };
    operation->succeed = [ending] { ending->known = true; };
    operation->fail = [ending](std::exception_ptr error) {
      ending->failure = torchspan::describe(error).text;
      ending->known = true;
    };
    queues_[rank]->submit(std::move(operation));
    return ending;
  }
  void await(const Ending& ending) {
    const Deadline limit = executor_->deadline_in(seconds(60));
    while (!ending.known) {
      ASSERT_FALSE(limit.passed(executor_->now())) << "the operation has not ended";
      executor_->sleep(std::chrono::milliseconds(1));
    }
  }

  /// Both ranks make `call`, but rank 0 is held in an earlier operation while rank 1 breaks the group. Returns how the call
  /// ends on rank 0.
  std::string end_after_break(const Call& call, bool rank_1_calls = true) {
    std::atomic<bool> broken{false};
    submit(0, Call{}, [&] {
      while (!broken) executor_->sleep(std::chrono::milliseconds(1));
    });
    await(*submit(1, Call{}));
    const auto mine = submit(0, call);
    if (rank_1_calls) submit(1, call);
    queues_[1]->abort(Error(ErrorKind::kCancelled, "enough"));
    broken = true;
    await(*mine);
    return mine->failure;
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Runtime> runtime_ = std::make_shared<Runtime>(*executor_, "worker0");
  testing::TemporaryFolder folder_;
  std::unique_ptr<rendezvous::Membership> membership_;
  std::vector<std::shared_ptr<PeerMemory>> memories_;
  std::vector<std::shared_ptr<OpQueue>> queues_;
};

TEST_F(OpQueueTest, EndsACallThatAllRanksMadeBeforeTheGroupBroke) {
  EXPECT_EQ(end_after_break(Call{}), "");
  const auto later = submit(0, Call{});
  await(*later);
  EXPECT_THAT(later->failure, HasSubstr("enough"));
}

TEST_F(OpQueueTest, EndsSuchACallWhoseDataAreInTheSlots) {
  EXPECT_EQ(end_after_break({.verb = Verb::kAllReduce, .bytes = 4, .in_slot = 1}), "");
}

TEST_F(OpQueueTest, FailsACallWhoseDataAreStillToBeSentWhenTheGroupBreaks) {
  EXPECT_THAT(end_after_break({.verb = Verb::kAllReduce, .bytes = kSlotBytes + 1}), HasSubstr("enough"));
}

TEST_F(OpQueueTest, FailsACallThatARankHadNotMadeWhenTheGroupBroke) {
  EXPECT_THAT(end_after_break(Call{}, /*rank_1_calls=*/false), HasSubstr("enough"));
}

}  // namespace
}  // namespace torchspan::collective::shm::op_queue_test
