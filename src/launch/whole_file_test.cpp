#include "launch/whole_file.h"

#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <sys/stat.h>
#include <unistd.h>

#include "core/api/descriptor.h"
#include "launch/captured.h"
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

// With `2> job.log`, opening /dev/stderr for the error file would erase the log.
TEST(WholeFile, KeepsWhatAStandardStreamContains) {
  const testing::TemporaryFolder folder;
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    const std::string log = folder.path() + "/log" + std::to_string(stream);
    {
      const Redirected redirected(stream, log);
      redirected.write("earlier\n");
      EXPECT_EQ(write_whole_file(stream == STDOUT_FILENO ? "/dev/stdout" : "/dev/stderr", "through link\n"),
                "");
      EXPECT_EQ(write_whole_file(log, "by name\n"), "");
      redirected.write("later\n");
      EXPECT_EQ(is_standard_output(log), stream == STDOUT_FILENO);
      EXPECT_EQ(is_standard_output(folder.path() + "/none"), false);
    }
    EXPECT_EQ(read_text(log), "earlier\nthrough link\nby name\nlater\n");
  }
}

TEST(WholeFile, DoesNotWaitForTheReaderOfAPipe) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(write_whole_file(path, "text"), "no process reads this pipe");
  const Descriptor reader(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EQ(write_whole_file(path, "text"), "");
  std::string got(10, '\0');
  EXPECT_EQ(read(reader.get(), got.data(), got.size()), 4);
  EXPECT_TRUE(std::filesystem::is_fifo(path));
}

TEST(WholeFile, HasThePermissionsThatTheProcessGivesToNewFiles) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/file";
  const mode_t before = umask(002);
  EXPECT_EQ(write_whole_file(path, "text"), "");
  umask(before);
  EXPECT_EQ(static_cast<int>(std::filesystem::status(path).permissions()), 0664);
}

}  // namespace
}  // namespace torchspan::launch::whole_file_test
