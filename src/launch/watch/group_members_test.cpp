#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <random>

#include "core/api/step_part.h"
#include "launch/watch/diagnosis.h"

namespace torchspan::launch::group_members_test {
namespace {

std::vector<WorkerReport> workers(int world) {
  std::vector<WorkerReport> all(static_cast<std::size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    all[static_cast<std::size_t>(rank)].rank = rank;
    all[static_cast<std::size_t>(rank)].world = world;
  }
  return all;
}

TEST(GroupMembers, AreFoundFromTheNumberOfARangeOfRanks) {
  const auto all = workers(8);
  using Ranks = std::vector<int>;
  for (const Ranks& ranks :
       {Ranks{0, 1, 2, 3, 4, 5, 6, 7}, Ranks{4, 5, 6, 7}, Ranks{1, 3, 5, 7}, Ranks{2}, Ranks{0, 3, 6}}) {
    EXPECT_EQ(members_of_group(group_number(ranks), all), std::set<int>(ranks.begin(), ranks.end()));
  }
  EXPECT_EQ(members_of_group(group_number(Ranks{1, 3}, /*instance=*/17), all), (std::set<int>{1, 3}));
  EXPECT_EQ(members_of_group(-1, all).size(), 8u);
}

TEST(GroupMembers, AreElseThoseThatAreSeenInTheGroup) {
  auto all = workers(6);
  const int number = group_number(std::vector<int>{5, 0, 1});
  EXPECT_TRUE(members_of_group(number, all).empty());
  all[5].open = {{"collective", "all_reduce", 1, 3, number}};
  all[1].ended = {{"collective", "all_reduce", 1, 2, number}};
  all[2].open = {{"bucket", "bucket 3", 1, 3, number}};
  EXPECT_EQ(members_of_group(number, all), (std::set<int>{1, 5}));
}

TEST(GroupMembers, LeaveOutRanksOfOtherHosts) {
  auto all = workers(4);
  all.resize(2);
  EXPECT_EQ(members_of_group(group_number(std::vector<int>{0, 1, 2, 3}), all), (std::set<int>{0, 1}));
}

TEST(GroupMembers, HaveNumbersThatDiffer) {
  std::mt19937 random(7);
  std::set<std::int32_t> numbers;
  std::set<std::vector<int>> lists;
  for (int i = 0; i < 2000; ++i) {
    std::vector<int> ranks(16);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::shuffle(ranks.begin(), ranks.end(), random);
    ranks.resize(random() % 16 + 1);
    lists.insert(ranks);
    numbers.insert(group_number(ranks));
    EXPECT_GE(group_number(ranks), 0);
  }
  EXPECT_EQ(numbers.size(), lists.size());
}

TEST(GroupMembers, HaveNumbersThatSayTheirRanksAndTellGroupsOfTheSameRanksApart) {
  const std::vector<int> ranks{0, 2, 4}, others{0, 2, 5};
  std::set<std::int32_t> numbers;
  for (std::uint64_t instance = 0; instance < 100; ++instance) {
    const std::int32_t number = group_number(ranks, instance);
    EXPECT_TRUE(has_ranks(number, ranks));
    EXPECT_FALSE(has_ranks(number, others));
    numbers.insert(number);
  }
  EXPECT_EQ(numbers.size(), 100u);
}

}  // namespace
}  // namespace torchspan::launch::group_members_test
