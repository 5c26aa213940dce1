#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <set>
#include <unordered_set>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

namespace torchspan::buffer_test {
namespace {

TEST(AllocateBuffer, ReturnsAnEmptyBufferForZeroBytes) {
  const Buffer buffer = allocate_buffer(0);
  EXPECT_EQ(buffer.data, nullptr);
  EXPECT_EQ(buffer.size, 0u);
  EXPECT_EQ(buffer.owner, nullptr);
}

TEST(AllocateBuffer, GivesAlignedWritableMemoryOfEverySize) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  for (const std::size_t size : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{65},
                                 std::size_t{4097}, kMiB - 1, kMiB, kMiB + 1, 5 * kMiB + 3}) {
    SCOPED_TRACE(::testing::Message() << size << " bytes");
    const Buffer buffer = allocate_buffer(size);
    ASSERT_EQ(buffer.size, size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data) % 64, 0u);
    std::memset(buffer.data, 0x5A, size);
    EXPECT_EQ(buffer.data[size - 1], std::byte{0x5A});
  }
}

TEST(AllocateBuffer, KeepsTheMemoryAsLongAsTheOwnerIsHeld) {
  Buffer buffer = allocate_buffer(1000);
  std::memset(buffer.data, 7, buffer.size);
  std::byte* data = buffer.data;
  const std::shared_ptr<void> owner = buffer.owner;
  buffer = Buffer{};
  EXPECT_EQ(data[999], std::byte{7});
}

TEST(AllocateBuffer, ReportsThatMemoryIsExhausted) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> sizes{kMost, kMost - 63, kMost - (std::size_t{2} << 20), kMost / 2 - 4096};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  sizes.push_back(std::size_t{1} << 60);  // the sanitizers end the process here
#endif
  for (const std::size_t size : sizes) {
    try {
      allocate_buffer(size);
      ADD_FAILURE() << size << " bytes were given";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
    }
  }
}

TEST(GlobalId, IsOrderedAndHashedByWorkerAndCounter) {
  const GlobalId a{1, 2}, b{1, 3}, c{2, 0};
  EXPECT_LT(a, b);
  EXPECT_LT(b, c);
  EXPECT_EQ(a, (GlobalId{1, 2}));
  std::unordered_set<GlobalId> ids;
  std::set<std::size_t> hashes;
  for (std::uint32_t worker = 0; worker < 30; ++worker) {
    for (std::uint64_t local = 0; local < 100; ++local) {
      ids.insert({worker, local});
      hashes.insert(std::hash<GlobalId>()({worker, local}));
    }
  }
  EXPECT_EQ(ids.size(), 3000u);
  EXPECT_EQ(hashes.size(), 3000u);
}

}  // namespace
}  // namespace torchspan::buffer_test
