#include "collective/point_to_point/message_queue.h"

#include <gmock/gmock.h>
#include <random>

#include <ATen/Functions.h>

#include "tests/support/errors.h"

namespace torchspan::collective::message_queue_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

MessageOperationPtr operation(bool sends, int tag, int peer = 1) {
  auto made = std::make_shared<MessageOperation>();
  made->sends = sends;
  made->peer = peer;
  made->tag = tag;
  made->contents = "Float [3]";
  return made;
}
MessageOperationPtr from_any(int tag) {
  auto made = operation(false, tag, kNoPeer);
  made->from_any = true;
  return made;
}
Offered offer(std::uint64_t number, std::uint32_t tag, int rank = 1) {
  return {rank, {number, tag, "Float [3]"}};
}

TEST(MessageQueue, MatchesOffersAndReceivesOfATagInTheirOrder) {
  MessageQueue queue;
  const auto first = operation(false, 2), second = operation(false, 2), other = operation(false, 5);
  EXPECT_FALSE(queue.add_receive(first));
  EXPECT_FALSE(queue.add_receive(other));
  EXPECT_FALSE(queue.add_receive(second));
  EXPECT_EQ(queue.take_receive(1, 3), nullptr);
  EXPECT_EQ(queue.take_receive(2, 2), nullptr) << "another rank";
  EXPECT_EQ(queue.take_receive(1, 2), first);
  EXPECT_EQ(queue.take_receive(1, 2), second);
  EXPECT_EQ(queue.take_receive(1, 2), nullptr);
  queue.keep(offer(7, 4));
  queue.keep(offer(8, 3));
  queue.keep(offer(9, 4));
  queue.keep(offer(3, 4, 2));
  EXPECT_EQ(queue.unmatched(1), "Float [3] with tag 4; Float [3] with tag 3; Float [3] with tag 4");
  EXPECT_EQ(queue.unmatched(2), "Float [3] with tag 4");
  EXPECT_EQ(queue.add_receive(operation(false, 4))->offer.number, 7U);
  EXPECT_EQ(queue.add_receive(operation(false, 4, 2))->offer.number, 3U);
  EXPECT_EQ(queue.add_receive(operation(false, 4))->offer.number, 9U);
  EXPECT_EQ(queue.take_all(), (std::deque<MessageOperationPtr>{other}));
  EXPECT_EQ(queue.unmatched(1), "");
  EXPECT_FALSE(queue.needs(1));
}

TEST(MessageQueue, GivesAMessageToTheEarliestReceiveForItsRankOrForAny) {
  MessageQueue queue;
  const auto specific = operation(false, 0, 2), any = from_any(0), later = operation(false, 0, 2);
  for (const auto& one : {specific, any, later}) EXPECT_FALSE(queue.add_receive(one));
  EXPECT_EQ(queue.first_from_any(), any);
  EXPECT_TRUE(queue.needs(2));
  EXPECT_FALSE(queue.needs(1)) << "another rank may send to a receive from any";
  EXPECT_EQ(queue.take_receive(2, 0), specific);
  EXPECT_EQ(queue.take_receive(3, 0), any) << "rank 3 has no receive for it only";
  EXPECT_EQ(queue.first_from_any(), nullptr);
  EXPECT_EQ(queue.take_receive(3, 0), nullptr);
  EXPECT_EQ(queue.take_receive(2, 0), later);
}

TEST(MessageQueue, GivesAReceiveFromAnyTheMessageThatArrivedFirst) {
  MessageQueue queue;
  queue.keep(offer(0, 1, 3));
  queue.keep(offer(0, 0, 2));
  queue.keep(offer(1, 0, 3));
  queue.keep(offer(1, 0, 2));
  EXPECT_EQ(queue.add_receive(from_any(0))->rank, 2);
  EXPECT_EQ(queue.add_receive(operation(false, 0, 2))->offer.number, 1U);
  EXPECT_EQ(queue.add_receive(from_any(0))->rank, 3);
  EXPECT_FALSE(queue.add_receive(from_any(0))) << "the message of tag 1 is for another receive";
  queue.drop_offers(3);
  EXPECT_FALSE(queue.add_receive(from_any(1))) << "its sender is gone";
}

TEST(MessageQueue, KnowsTheSenderOfAMessageOnceItIsMatched) {
  MessageQueue queue;
  const auto any = from_any(6);
  EXPECT_EQ(any->call(), "recv(Float [3] from any rank, tag 6)");
  EXPECT_FALSE(queue.add_receive(any));
  EXPECT_FALSE(queue.needs(4));
  EXPECT_EQ(queue.take_receive(4, 6), any);
  queue.begin_receiving(any, 4, 11);
  EXPECT_EQ(any->peer, 4);
  EXPECT_EQ(any->call(), "recv(Float [3] from any rank, tag 6)") << "the call stays what it was";
  EXPECT_TRUE(queue.needs(4)) << "its data must still arrive";
  EXPECT_EQ(queue.receiving(4, 11), any);
  queue.finish(*any);
  EXPECT_FALSE(queue.needs(4));
}

/// The same rules, written down as directly as possible: every receive and every message in two lists.
class Oracle {
 public:
  /// Ids of the receive and of the message that match now.
  using Match = std::pair<int, int>;
  struct Post {
    int id, rank, tag;  ///< rank of a receive: kNoPeer for any
  };
  std::optional<Match> receive(const Post& receive) { return add(receive, messages_, receives_, true); }
  std::optional<Match> message(const Post& message) { return add(message, receives_, messages_, false); }

 private:
  static bool fit(const Post& a, const Post& b) {
    return a.tag == b.tag && (a.rank == b.rank || a.rank == kNoPeer || b.rank == kNoPeer);
  }
  static std::optional<Match> add(const Post& mine, std::vector<Post>& theirs, std::vector<Post>& ours,
                                  bool receives) {
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      if (!fit(mine, theirs[i])) continue;
      const int other = theirs[i].id;
      theirs.erase(theirs.begin() + static_cast<std::ptrdiff_t>(i));
      return receives ? Match(mine.id, other) : Match(other, mine.id);
    }
    ours.push_back(mine);
    return std::nullopt;
  }
  std::vector<Post> receives_, messages_;
};

TEST(MessageQueue, MatchesRandomSchedulesAsTheRulesSay) {
  const auto seed = std::random_device()();
  for (unsigned round = 0; round < 200; ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", round " << round);
    std::mt19937 random(seed + round);
    const int ranks = 2 + static_cast<int>(random() % 4), tags = 1 + static_cast<int>(random() % 3);
    MessageQueue queue;
    Oracle oracle;
    std::map<MessageOperationPtr, int> ids;
    std::map<int, std::uint64_t> sent;                      // by rank
    std::map<std::pair<int, std::uint64_t>, int> messages;  // by rank and number
    std::map<std::pair<int, int>, std::uint64_t> last;      // of a rank and tag, the number received last
    for (int id = 0; id < 120; ++id) {
      const int rank = 1 + static_cast<int>(random() % static_cast<unsigned>(ranks));
      const int tag = static_cast<int>(random() % static_cast<unsigned>(tags));
      std::optional<Oracle::Match> match;
      std::pair<int, std::uint64_t> taken;
      if (random() % 2 == 0) {
        const bool any = random() % 3 == 0;
        const auto receive = any ? from_any(tag) : operation(false, tag, rank);
        ids[receive] = id;
        if (const auto offered = queue.add_receive(receive)) {
          taken = {offered->rank, offered->offer.number};
          match = {id, messages.at(taken)};
        }
        EXPECT_EQ(match, oracle.receive({id, any ? kNoPeer : rank, tag}));
      } else {
        const Offered offered = offer(sent[rank]++, static_cast<std::uint32_t>(tag), rank);
        messages[{rank, offered.offer.number}] = id;
        if (const auto receive = queue.take_receive(rank, offered.offer.tag)) {
          taken = {rank, offered.offer.number};
          match = {ids.at(receive), id};
        } else {
          queue.keep(offered);
        }
        EXPECT_EQ(match, oracle.message({id, rank, tag}));
      }
      if (!match) continue;
      const auto [before, first] = last.try_emplace({taken.first, tag}, taken.second);
      EXPECT_TRUE(first || before->second < taken.second)
          << "messages of one rank and tag overtook each other";
      before->second = taken.second;
    }
  }
}

TEST(MessageQueue, NumbersMessagesToEachRankAndKnowsThemUntilTheyEnd) {
  MessageQueue queue;
  const auto sent = operation(true, 1), again = operation(true, 1), other = operation(true, 1, 2);
  const auto received = operation(false, 1);
  EXPECT_EQ(queue.add_send(sent).number, 0U);
  EXPECT_EQ(queue.add_send(again).number, 1U);
  EXPECT_EQ(queue.add_send(other).number, 0U);
  EXPECT_EQ(queue.sending(1, 1), again);
  EXPECT_EQ(queue.sending(2, 0), other);
  queue.begin_receiving(received, 1, 1);
  EXPECT_EQ(queue.receiving(1, 1), received);
  queue.finish(*again);
  EXPECT_EQ(queue.receiving(1, 1), received) << "numbers of the two directions are independent";
  EXPECT_EQ(queue.sending(1, 0), sent);
}

TEST(MessageQueue, RejectsNumbersThatARankMayNotSend) {
  MessageQueue queue;
  EXPECT_EQ(error_of([&] { queue.sending(1, 0); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { queue.receiving(1, 3); }).kind(), ErrorKind::kInvalid);
  queue.begin_receiving(operation(false, 1), 1, 3);
  EXPECT_EQ(error_of([&] { queue.receiving(2, 3); }).kind(), ErrorKind::kInvalid)
      << "the message of another rank";
  const auto second = operation(false, 1);
  const Error twice = error_of([&] { queue.begin_receiving(second, 1, 3); });
  EXPECT_EQ(twice.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(twice.what(), HasSubstr("message 3 twice"));
  EXPECT_EQ(queue.take_all().size(), 2U) << "both fail with the group";
}

}  // namespace
}  // namespace torchspan::collective::message_queue_test
