#include "core/api/system_files.h"

#include <gtest/gtest.h>

namespace torchspan::system_files_test {
namespace {

TEST(SystemFiles, AreReadWholeOrByTheirFirstLine) {
  const std::string limits = read_system_file("/proc/self/limits"),
                    line = read_system_line("/proc/self/limits");
  EXPECT_TRUE(limits.starts_with(line + "\n"));
  EXPECT_TRUE(line.starts_with("Limit ")) << line;
  EXPECT_EQ(boot_id().size(), 36u) << boot_id();
}

TEST(SystemFiles, AreEmptyIfTheyCannotBeRead) {
  for (const char* path : {"/proc/self/no-such-file", "/proc/self"}) {
    EXPECT_EQ(read_system_file(path), "");
    EXPECT_EQ(read_system_line(path), "");
  }
}

}  // namespace
}  // namespace torchspan::system_files_test
