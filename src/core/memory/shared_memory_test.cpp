#include <array>
#include <cerrno>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/api/descriptor.h"

namespace torchspan::shared_memory_test {
namespace {

constexpr std::size_t kSize = 1 << 16;

TEST(SharedMemory, OfOneFileIsTheSameInEveryMapping) {
  const Descriptor file = create_memory_file("test");
  ASSERT_TRUE(seal_memory_file(file, kSize, FilePages::kReserved));
  const SharedMemory one = SharedMemory::map(file, kSize), other = SharedMemory::map(file, kSize);
  ASSERT_TRUE(one && other);
  one.data()[kSize - 1] = std::byte{42};
  EXPECT_EQ(other.data()[kSize - 1], std::byte{42});
}

TEST(SharedMemory, ChecksWhetherARangeLiesInside) {
  const Descriptor file = create_memory_file("test");
  ASSERT_TRUE(seal_memory_file(file, kSize, FilePages::kOnDemand));
  const SharedMemory memory = SharedMemory::map(file, kSize);
  EXPECT_TRUE(memory.holds(0, kSize));
  EXPECT_TRUE(memory.holds(kSize, 0));
  EXPECT_FALSE(memory.holds(kSize - 4, 5));
  EXPECT_FALSE(memory.holds(~std::uint64_t{0}, 5));
  EXPECT_FALSE(memory.holds(5, ~std::uint64_t{0}));
}

TEST(SharedMemory, HasPagesFromTheStartOnlyIfReserved) {
  for (const FilePages pages : {FilePages::kReserved, FilePages::kOnDemand}) {
    const Descriptor file = create_memory_file("test");
    ASSERT_TRUE(seal_memory_file(file, kSize, pages));
    struct stat about {};
    ASSERT_EQ(::fstat(file.get(), &about), 0);
    EXPECT_EQ(about.st_blocks * 512, pages == FilePages::kReserved ? static_cast<blkcnt_t>(kSize) : 0);
  }
}

TEST(SharedMemory, FilesAreSealedAtTheirSize) {
  const Descriptor file = create_memory_file("test");
  EXPECT_FALSE(is_sealed_memory_file(file, 0));
  ASSERT_TRUE(seal_memory_file(file, kSize, FilePages::kReserved));
  EXPECT_TRUE(is_sealed_memory_file(file, kSize));
  EXPECT_FALSE(is_sealed_memory_file(file, kSize + 1));
  EXPECT_NE(::ftruncate(file.get(), 0), 0);
  EXPECT_FALSE(is_sealed_memory_file(Descriptor(::dup(STDERR_FILENO)), 0));
}

TEST(SharedMemory, IsAbsentWhenTheSystemRefuses) {
  EXPECT_FALSE(SharedMemory::map(Descriptor(), kSize));
  EXPECT_FALSE(SharedMemory());
}

class Passing : public ::testing::Test {
 protected:
  Passing() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    here_ = Descriptor(ends[0]);
    there_ = Descriptor(ends[1]);
  }

  Descriptor here_, there_;
  const Bytes bytes_ = Bytes(3, std::byte{7});
  std::array<std::byte, 16> place_{};
};

TEST_F(Passing, PassesDescriptorsWithBytes) {
  const Descriptor file = create_memory_file("test");
  ASSERT_TRUE(seal_memory_file(file, kSize, FilePages::kOnDemand));
  ASSERT_EQ(send_with_descriptor(here_.get(), bytes_, file.get(), 0), 3);
  const ReceivedBytes received = receive_with_descriptors(there_.get(), place_, 0);
  EXPECT_EQ(received.size, 3);
  EXPECT_FALSE(received.truncated);
  ASSERT_EQ(received.descriptors.size(), 1u);
  EXPECT_NE(received.descriptors[0].get(), file.get());
  EXPECT_TRUE(is_sealed_memory_file(received.descriptors[0], kSize));
}

TEST_F(Passing, DistinguishesAnEmptySocketFromAClosedOne) {
  EXPECT_EQ(receive_with_descriptors(there_.get(), place_, 0).size, -1);
  EXPECT_EQ(errno, EAGAIN);
  ASSERT_EQ(send_with_descriptor(here_.get(), bytes_, -1, 0), 3);
  const ReceivedBytes received = receive_with_descriptors(there_.get(), place_, 0);
  EXPECT_EQ(received.size, 3);
  EXPECT_TRUE(received.descriptors.empty());
  here_.reset();
  EXPECT_EQ(receive_with_descriptors(there_.get(), place_, 0).size, 0);
}

}  // namespace
}  // namespace torchspan::shared_memory_test
