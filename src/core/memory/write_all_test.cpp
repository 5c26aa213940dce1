#include "core/api/write_all.h"

#include <cerrno>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

#include "core/api/descriptor.h"

namespace torchspan::write_all_test {
namespace {

TEST(WriteAll, WritesEverythingOrReturnsTheReason) {
  const Descriptor file(open("/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  const std::string text(100'000, 'x');
  EXPECT_EQ(write_all(file.get(), text), 0);
  EXPECT_EQ(lseek(file.get(), 0, SEEK_CUR), std::ssize(text));
  const Descriptor full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  EXPECT_EQ(write_all(full.get(), text), ENOSPC);
  EXPECT_EQ(write_all(-1, text), EBADF);
  EXPECT_EQ(write_all(-1, ""), 0);
}

}  // namespace
}  // namespace torchspan::write_all_test
