#include "collective/shm/arena.h"

#include <cstring>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <torchspan/core/error.h>

namespace torchspan::collective::shm::arena_test {
namespace {

std::uint64_t bytes_held(const Arena& arena) {
  struct stat about {};
  EXPECT_EQ(::fstat(arena.descriptor().get(), &about), 0);
  return static_cast<std::uint64_t>(about.st_blocks) * 512;
}

TEST(Arena, HoldsMemoryOnlyForWhatIsAllocated) {
  const auto arena = Arena::make(std::uint64_t{1} << 30);
  EXPECT_EQ(bytes_held(*arena), 0u);
  auto block = arena->allocate(1 << 20);
  std::memset(block.get(), 7, 1 << 20);
  EXPECT_TRUE(arena->holds(block.get(), 1 << 20));
  EXPECT_EQ(bytes_held(*arena), std::uint64_t{1} << 20);
  block.reset();
  EXPECT_EQ(bytes_held(*arena), 0u);
}

TEST(Arena, GivesZeroedMemoryAgain) {
  const auto arena = Arena::make(8 << 12);
  for (int time = 0; time < 3; ++time) {
    const auto block = arena->allocate(8 << 12);
    for (int i = 0; i < 8 << 12; ++i) ASSERT_EQ(block.get()[i], std::byte{0});
    std::memset(block.get(), 0xFF, 8 << 12);
  }
}

TEST(Arena, MergesAdjacentFreeBlocksInAnyOrder) {
  const auto arena = Arena::make(6 << 12);
  for (const auto& order : std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    std::vector<std::shared_ptr<std::byte>> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(arena->allocate(2 << 12));
    EXPECT_THROW(arena->allocate(1), Error);
    for (const int i : order) blocks[i].reset();
    EXPECT_NO_THROW(arena->allocate(6 << 12));
  }
}

TEST(Arena, IsVisibleThroughEveryMappingOfItsFile) {
  const auto arena = Arena::make(1 << 20);
  const auto block = arena->allocate(100);
  const SharedMemory other = map_arena(Descriptor(::dup(arena->descriptor().get())), 1 << 20);
  block.get()[5] = std::byte{42};
  EXPECT_EQ(other.data()[arena->offset_of(block.get()) + 5], std::byte{42});
  EXPECT_FALSE(other.holds((1 << 20) - 4, 5));
  EXPECT_FALSE(other.holds(~std::uint64_t{0}, 5));
  EXPECT_FALSE(other.holds(5, ~std::uint64_t{0}));
}

TEST(Arena, RefusesFilesThatCouldShrink) {
  const Descriptor plain(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 4096), 0);
  EXPECT_THROW(map_arena(plain, 4096), Error);
  const auto arena = Arena::make(1 << 20);
  EXPECT_THROW(map_arena(arena->descriptor(), 1 << 21), Error);
}

TEST(Arena, BlocksOutliveTheirArenasOwner) {
  auto arena = Arena::make(1 << 20);
  const auto block = arena->allocate(64);
  arena.reset();
  block.get()[63] = std::byte{1};
}

}  // namespace
}  // namespace torchspan::collective::shm::arena_test
