#include "autograd/contexts/context_lifetimes.h"

#include <gtest/gtest.h>

namespace torchspan::autograd::context_lifetimes_test {
namespace {

/// A worker's ids: its rank in the high bits, then those of its process, which are greater than those of earlier ones.
constexpr std::uint64_t id_of(std::uint64_t rank, std::uint64_t local) { return (rank << 48) | local; }

TEST(Registry, DistinguishesIdsOfThisProcessFromThoseOfEarlierOnes) {
  Registry registry("worker3", [] { return GlobalId{3, 5000}; });
  EXPECT_TRUE(registry.is_of_former_process(id_of(3, 4999)));
  const std::uint64_t first = registry.next_id(), second = registry.next_id();
  EXPECT_LT(first, second);
  EXPECT_EQ(maker_of(first), 3U);
  EXPECT_FALSE(registry.is_of_former_process(first));
  EXPECT_FALSE(registry.is_of_former_process(second));
  EXPECT_FALSE(registry.is_of_former_process(id_of(2, 1))) << "of another worker";
  EXPECT_FALSE(registry.is_of_former_process(id_of(4, 1))) << "of another worker";
}

}  // namespace
}  // namespace torchspan::autograd::context_lifetimes_test
