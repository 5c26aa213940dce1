#include <gtest/gtest.h>

#include "rendezvous/client/client_rounds.h"

namespace torchspan::rendezvous::round_numbers_test {
namespace {

Contribute contribution(const std::string& tag, bool once) {
  Contribute message;
  message.tag = tag;
  message.ranks = {0, 1};
  message.once = once;
  return message;
}

std::uint32_t first_incarnation(int) { return 0; }

TEST(RoundNumbers, CountTheRoundsOfATag) {
  RoundNumbers numbers;
  for (std::uint64_t round = 0; round < 3; ++round) {
    Contribute message = contribution("a", false);
    numbers.number(message, first_incarnation);
    EXPECT_EQ(message.round, round);
    EXPECT_EQ(message.incarnations, std::vector<std::uint32_t>(2));
  }
  EXPECT_EQ(numbers.size(), 1U);
}

TEST(RoundNumbers, KeepNothingOfAThousandTagsThatAreUsedOnce) {
  RoundNumbers numbers;
  Contribute before = contribution("a", false);
  numbers.number(before, first_incarnation);
  for (int group = 0; group < 1000; ++group) {
    Contribute message = contribution("torchspan.messages." + std::to_string(group), true);
    numbers.number(message, first_incarnation);
    EXPECT_EQ(message.round, 0U);
    EXPECT_EQ(message.incarnations, std::vector<std::uint32_t>(2));
  }
  EXPECT_EQ(numbers.size(), 1U);
}

}  // namespace
}  // namespace torchspan::rendezvous::round_numbers_test
