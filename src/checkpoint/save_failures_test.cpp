#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::save_failures_test {

using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::error_text;
using torchspan::testing::TemporaryFolder;

TEST(CheckpointManager, ThrowsTheFailureOfAnAsynchronousSaveAtTheNextOne) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path() + "/run"});
  at::Tensor x = torch::ones({3});
  manager.add("x", x);
  manager.save(1);
  manager.wait();
  // A file takes the place of the directory.
  std::filesystem::remove_all(folder.path() + "/run");
  CheckpointManager blocker({.directory = folder.path() + "/other"});
  blocker.add("x", x);
  blocker.save(1);
  blocker.wait();
  std::filesystem::copy_file(folder.path() + "/other/latest", folder.path() + "/run");
  manager.save(2);
  EXPECT_THAT(error_text([&] { manager.save(3); }),
              ::testing::AllOf(HasSubstr("the checkpoint of step 2 was not saved"),
                               HasSubstr(folder.path() + "/run")));
  std::filesystem::remove(folder.path() + "/run");
  manager.save(4);
  manager.wait();
  EXPECT_EQ(manager.restore(), 4);
}

/// Keeps threads from starting: their stacks are larger than the address space.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    ::pthread_getattr_default_np(&huge);
    ::pthread_attr_setstacksize(&huge, std::size_t{1} << 48);
    ::pthread_setattr_default_np(&huge);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(CheckpointManager, DeletesWhatItsFailedSavesLeft) {
  const TemporaryFolder folder;
  std::int64_t number = 7;
  CheckpointManager manager({.directory = folder.path()});
  manager.add("number", number);
  manager.save(1);
  manager.wait();
  {
    const NoThreads none;
    manager.save(2);
  }
  EXPECT_THAT(error_text([&] { manager.wait(); }), HasSubstr("the checkpoint of step 2 was not saved"));
  // As a rank leaves it that begins to write after the committing rank has given up.
  const std::string partial = folder.path() + "/step-00000002.partial-0123456789abcdef";
  std::filesystem::create_directories(partial);
  manager.save(3);
  manager.wait();
  EXPECT_FALSE(std::filesystem::exists(partial));
  std::filesystem::create_directories(partial);  // as another job on a file system without locks
  manager.save(4);
  manager.wait();
  EXPECT_TRUE(std::filesystem::exists(partial));
}

/// The other ranks wait for each rank that has agreed to a save.
TEST(CheckpointManager, EndsTheSaveIfItsThreadCannotStart) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path()});
  at::Tensor x = torch::ones({3});
  manager.add("x", x);
  {
    const NoThreads none;
    manager.save(1);
  }
  const Error error = error_of([&] { manager.wait(); });
  EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
  EXPECT_THAT(error.message(), ::testing::AllOf(HasSubstr("the checkpoint of step 1 was not saved"),
                                                HasSubstr("'checkpoint writer' could not start")));
  manager.save(2);
  manager.wait();
  EXPECT_EQ(manager.restore(), 2);
}

}  // namespace torchspan::checkpoint::save_failures_test
