#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/files/directory.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::directory_lock_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::TemporaryFolder;

TEST(DirectoryLock, ExcludesASecondHolderAndNamesTheFirst) {
  const TemporaryFolder folder;
  std::optional<DirectoryLock> first(std::in_place);
  EXPECT_EQ(first->take(folder.path(), "worker3 (pid 17 on node9), a longer text"), "");
  EXPECT_EQ(first->take(folder.path(), "worker3"), "") << "it has the lock already";
  DirectoryLock second;
  const Error error = error_of([&] { second.take(folder.path(), "worker4"); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  EXPECT_THAT(error.message(), AllOf(HasSubstr("worker3 (pid 17 on node9), a longer text writes"),
                                     HasSubstr(folder.path()), HasSubstr("choose another directory")));
  first.reset();
  EXPECT_EQ(second.take(folder.path(), "worker4"), "");
  DirectoryLock third;
  EXPECT_THAT(error_of([&] { third.take(folder.path(), "worker5"); }).message(),
              AllOf(HasSubstr("worker4 writes"), ::testing::Not(HasSubstr("longer"))));
}

TEST(DirectoryLock, EndsWithItsProcessAlthoughAForkedChildLives) {
  const TemporaryFolder folder;
  int ready[2], end[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(end), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    DirectoryLock lock;
    lock.take(folder.path(), describe_holder("worker0"));
    if (fork() == 0) {
      // Answers once it has given up what it does not inherit, and lives until the test closes `end`.
      close(end[1]);
      char byte = 'x';
      if (write(ready[1], &byte, 1) != 1) _exit(1);
      _exit(read(end[0], &byte, 1) == 0 ? 0 : 1);
    }
    pause();
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  DirectoryLock next;
  EXPECT_THAT(error_of([&] { next.take(folder.path(), "next"); }).message(),
              HasSubstr("worker0 of process " + std::to_string(holder) + " on "));
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  EXPECT_EQ(next.take(folder.path(), "next"), "");
  for (const int descriptor : {ready[0], ready[1], end[0], end[1]}) close(descriptor);
}

TEST(DirectoryLock, NamesADirectoryThatIsMissing) {
  DirectoryLock lock;
  EXPECT_THAT(error_of([&] { lock.take("/nowhere/checkpoints", "worker0"); }).message(),
              HasSubstr("cannot create '/nowhere/checkpoints/lock': No such file or directory"));
}

}  // namespace torchspan::checkpoint::directory_lock_test
