#include "collective/point_to_point/message_queue.h"

#include <gmock/gmock.h>

#include <ATen/Functions.h>

#include "tests/support/errors.h"

namespace torchspan::collective::message_queue_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::error_of;

MessageOperationPtr operation(bool sends, int tag) {
  auto made = std::make_shared<MessageOperation>();
  made->sends = sends;
  made->peer = 1;
  made->tag = tag;
  made->contents = "Float [3]";
  return made;
}
Offered offer(std::uint64_t number, std::uint32_t tag) { return {{number, tag, "Float [3]"}, {}}; }

TEST(MessageQueue, MatchesOffersAndReceivesOfATagInTheirOrder) {
  MessageQueue queue;
  const auto first = operation(false, 2), second = operation(false, 2), other = operation(false, 5);
  EXPECT_FALSE(queue.add_receive(first));
  EXPECT_FALSE(queue.add_receive(other));
  EXPECT_FALSE(queue.add_receive(second));
  EXPECT_EQ(queue.take_receive(3), nullptr);
  EXPECT_EQ(queue.take_receive(2), first);
  EXPECT_EQ(queue.take_receive(2), second);
  EXPECT_EQ(queue.take_receive(2), nullptr);
  queue.keep(offer(7, 4));
  queue.keep(offer(8, 3));
  queue.keep(offer(9, 4));
  EXPECT_EQ(queue.unmatched(), "Float [3] with tag 4; Float [3] with tag 3; Float [3] with tag 4");
  EXPECT_EQ(queue.add_receive(operation(false, 4))->offer.number, 7U);
  EXPECT_EQ(queue.add_receive(operation(false, 4))->offer.number, 9U);
  EXPECT_EQ(queue.take_all(), (std::deque<MessageOperationPtr>{other}));
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.unmatched(), "");
}

TEST(MessageQueue, NumbersMessagesAndKnowsThemUntilTheyEnd) {
  MessageQueue queue;
  const auto sent = operation(true, 1), again = operation(true, 1), received = operation(false, 1);
  EXPECT_EQ(queue.add_send(sent).number, 0U);
  EXPECT_EQ(queue.add_send(again).number, 1U);
  EXPECT_EQ(queue.sending(1), again);
  queue.begin_receiving(received, 1);
  EXPECT_EQ(queue.receiving(1), received);
  queue.finish(*again);
  EXPECT_EQ(queue.receiving(1), received) << "numbers of the two directions are independent";
  EXPECT_EQ(queue.sending(0), sent);
}

TEST(MessageQueue, RejectsNumbersThatARankMayNotSend) {
  MessageQueue queue;
  EXPECT_EQ(error_of([&] { queue.sending(0); }).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { queue.receiving(3); }).kind(), ErrorKind::kInvalid);
  queue.begin_receiving(operation(false, 1), 3);
  const auto second = operation(false, 1);
  const Error twice = error_of([&] { queue.begin_receiving(second, 3); });
  EXPECT_EQ(twice.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(twice.what(), HasSubstr("message 3 twice"));
  EXPECT_EQ(queue.take_all().size(), 2U) << "both fail with the group";
}

}  // namespace
}  // namespace torchspan::collective::message_queue_test
