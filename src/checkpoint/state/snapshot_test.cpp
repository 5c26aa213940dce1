#include "checkpoint/state/snapshot.h"

#include <algorithm>
#include <bit>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

namespace torchspan::checkpoint::snapshot_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(HostBlocks, HavePowersOfTwoThatExceedTheBytesByASixteenth) {
  EXPECT_THAT(pinned_block_sizes(0), IsEmpty());
  EXPECT_THAT(pinned_block_sizes(1), ElementsAre(1));
  EXPECT_THAT(pinned_block_sizes(65 * kMiB), ElementsAre(64 * kMiB, kMiB));
  EXPECT_THAT(pinned_block_sizes(100 * kMiB), ElementsAre(64 * kMiB, 32 * kMiB, 4 * kMiB));
  EXPECT_THAT(pinned_block_sizes(127 * kMiB), ElementsAre(128 * kMiB));
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t bytes = (random() >> (20 + random() % 40)) + 1;
    const std::vector<std::size_t> sizes = pinned_block_sizes(bytes);
    const std::size_t sum = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    EXPECT_TRUE(std::ranges::all_of(sizes, [](std::size_t size) { return std::has_single_bit(size); }));
    EXPECT_GE(sum, bytes);
    EXPECT_LE(sum, bytes + std::max<std::size_t>(bytes / 16, 4096));
    EXPECT_LE(sizes.size(), 6U) << bytes << " bytes";
  }
}

TEST(HostBlocks, GiveEveryByteItsPlace) {
  HostBlocks blocks;
  blocks.reserve(100'000, HostBlocks::Use::kDevice);
  ASSERT_THAT(pinned_block_sizes(100'000), ElementsAre(65536, 32768, 2048));
  EXPECT_THAT(blocks.pieces(0, 65536), SizeIs(1));
  EXPECT_THAT(blocks.pieces(65536, 1), SizeIs(1));
  EXPECT_THAT(blocks.pieces(65536, 0), IsEmpty());
  EXPECT_THAT(blocks.pieces(60'000, 40'000), SizeIs(3));
  std::byte* const first = blocks.pieces(0, 1).front().data();
  const auto across = blocks.pieces(65'000, 1000);
  ASSERT_THAT(across, SizeIs(2));
  EXPECT_EQ(across[0].data(), first + 65'000);
  EXPECT_EQ(across[0].size(), 536U);
  EXPECT_EQ(across[1].data(), blocks.pieces(65536, 1).front().data());
  EXPECT_EQ(across[1].size(), 464U);
}

TEST(HostBlocks, ReuseTheirMemoryWhileItIsLargeEnough) {
  HostBlocks blocks;
  EXPECT_EQ(blocks.capacity(), 0U);
  blocks.reserve(100'000, HostBlocks::Use::kHost);
  EXPECT_EQ(blocks.capacity(), 100'000U) << "not rounded where memory is not pinned";
  const std::byte* const before = blocks.pieces(0, 1).front().data();
  blocks.reserve(90'000, HostBlocks::Use::kDevice);
  EXPECT_EQ(blocks.pieces(0, 1).front().data(), before);
  blocks.reserve(100'001, HostBlocks::Use::kDevice);
  EXPECT_EQ(blocks.capacity(), std::size_t{65536 + 32768 + 2048});
}

TEST(HostBlocks, ReplaceMemoryThatIsNotPinnedByPinnedMemory) {
  std::vector<std::pair<std::size_t, bool>> allocated;
  HostBlocks blocks([&](std::size_t bytes, bool pinned) {
    allocated.emplace_back(bytes, pinned);
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte));
  });
  blocks.reserve(100'000, HostBlocks::Use::kHost);
  EXPECT_THAT(allocated, ElementsAre(Pair(100'000U, false)));
  allocated.clear();
  blocks.reserve(98'000, HostBlocks::Use::kPinned);
  EXPECT_THAT(allocated, ElementsAre(Pair(65536U, true), Pair(32768U, true)));
  EXPECT_EQ(blocks.capacity(), 98304U);
  allocated.clear();
  for (const auto use : {HostBlocks::Use::kPinned, HostBlocks::Use::kDevice, HostBlocks::Use::kHost})
    blocks.reserve(98'304, use);
  EXPECT_THAT(allocated, IsEmpty()) << "pinned memory is good for all copies";
  blocks.reserve(98'305, HostBlocks::Use::kHost);
  EXPECT_THAT(allocated, ElementsAre(Pair(98'305U, false)));
}

}  // namespace

}  // namespace torchspan::checkpoint::snapshot_test
