#include "launch/whole_file.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>

#include "tests/support/processes.h"

namespace torchspan::launch::whole_file_test {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::ptrdiff_t entries(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

TEST(WholeFile, IsCreatedAndReplaced) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/file";
  for (const std::string text : {"a longer text", "text", ""}) {
    EXPECT_EQ(write_whole_file(path, text), "");
    EXPECT_EQ(read_text(path), text);
  }
  EXPECT_EQ(entries(folder.path()), 1);
}

TEST(WholeFile, ReportsWhyItCannotBeWritten) {
  const testing::TemporaryFolder folder;
  EXPECT_EQ(write_whole_file(folder.path() + "/none/file", "x"), "No such file or directory");
  EXPECT_EQ(write_whole_file(folder.path(), "x"), "Is a directory");
  EXPECT_EQ(write_whole_file("/dev/full", "x"), "No space left on device");
  EXPECT_EQ(entries(folder.path()), 0);
}

// With rename(), `-o /dev/null` as root would replace the device of the whole system.
TEST(WholeFile, DoesNotReplaceDevicesAndLinks) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/file", link = folder.path() + "/link",
                    device = folder.path() + "/device";
  std::filesystem::create_symlink(path, link);
  std::filesystem::create_symlink("/dev/null", device);
  EXPECT_EQ(write_whole_file(link, "text"), "");
  EXPECT_EQ(write_whole_file(device, "text"), "");
  EXPECT_EQ(read_text(path), "text");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_TRUE(std::filesystem::is_character_file(device));
  EXPECT_EQ(entries(folder.path()), 3);
}

}  // namespace
}  // namespace torchspan::launch::whole_file_test
