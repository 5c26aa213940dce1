#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/files/directory.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::prepared_directory_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::error_text;
using torchspan::testing::TemporaryFolder;

/// A file system that may refuse to remove folders, as NFS does while a process has mapped a file in them.
class BusyCalls final : public DiskCalls {
 public:
  void remove_all(const char* path, std::error_code& error) override {
    ++calls;
    if (!busy || !std::string(path).ends_with(only)) return DiskCalls::remove_all(path, error);
    error = std::make_error_code(std::errc::directory_not_empty);
  }
  bool busy = false;
  std::string only;  ///< if not empty: the end of the only path that it does not remove
  int calls = 0;
};

/// A directory that a manager has prepared, and what it logs.
struct Fixture {
  std::string make(const std::string& name) const {
    std::filesystem::create_directories(folder.path() + "/" + name + "/inner");
    return folder.path() + "/" + name;
  }

  const TemporaryFolder folder;
  BusyCalls calls;
  const Disk disk{&calls};
  const Directory directory{disk, folder.path()};
  std::vector<std::string> lines;
  Log log{"test", LogLevel::kWarning, [this](LogLevel, const std::string& line) { lines.push_back(line); }};
  PreparedDirectory prepared{directory, "rank 0 ('worker0')", log};
};

TEST(PreparedDirectory, SavesAlthoughWhatAFailedSaveLeftCannotBeRemoved) {
  Fixture one;
  one.prepared.before_save();
  one.make("trash-step-00000001");
  one.calls.busy = true;
  one.prepared.before_save();
  EXPECT_THAT(one.lines, IsEmpty());
  one.prepared.save_failed();
  one.prepared.before_save();
  EXPECT_THAT(one.lines, ElementsAre(HasSubstr("leftovers of failed saves stay")));
  const int calls = one.calls.calls;
  one.prepared.before_save();
  EXPECT_EQ(one.calls.calls, calls) << "it tries once after each failure";
  one.calls.busy = false;
  one.prepared.save_failed();
  one.prepared.before_save();
  EXPECT_THAT(one.directory.leftovers(), IsEmpty());
}

TEST(PreparedDirectory, KeepsFoldersThatNoFailedSaveHasLeft) {
  Fixture one;
  one.make("step-00000001.partial-0123456789abcdef");
  one.prepared.before_save();
  EXPECT_THAT(one.directory.leftovers(), IsEmpty());
  one.make("step-00000002.partial-0123456789abcdef");
  one.prepared.before_save();
  one.prepared.before_restore();
  EXPECT_THAT(one.directory.leftovers(), ElementsAre("step-00000002.partial-0123456789abcdef"));
}

TEST(PreparedDirectory, SavesAlthoughWhatAnEarlierProcessLeftCannotBeRemoved) {
  Fixture one;
  const std::string partial = one.make("step-00000001.partial-0123456789abcdef");
  one.make("trash-step-00000002");
  one.calls.busy = true;
  one.calls.only = ".partial-0123456789abcdef";
  for (int i = 0; i < 2; ++i) one.prepared.before_save();
  EXPECT_THAT(one.lines, ElementsAre(HasSubstr("cannot remove '" + partial)));
  EXPECT_THAT(one.directory.leftovers(), ElementsAre("step-00000001.partial-0123456789abcdef"))
      << "the others are removed";
}

TEST(PreparedDirectory, FailsUntilTheDirectoryCanBeCreated) {
  Fixture one;
  const Directory inside(one.disk, one.folder.path() + "/file/run");
  PreparedDirectory prepared(inside, "rank 0 ('worker0')", one.log);
  one.disk.write_file(one.folder.path() + "/file", "text");
  for (int i = 0; i < 2; ++i) EXPECT_THAT(error_text([&] { prepared.before_save(); }), HasSubstr("file/run"));
  one.disk.remove(one.folder.path() + "/file");
  prepared.before_save();
  EXPECT_THAT(inside.leftovers(), IsEmpty());
  EXPECT_THAT(one.lines, IsEmpty());
}

}  // namespace torchspan::checkpoint::prepared_directory_test
