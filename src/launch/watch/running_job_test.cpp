#include "launch/watch/running_job.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <gtest/gtest.h>
#include <optional>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/supervisor/prepare.h"
#include "tests/support/processes.h"

namespace torchspan::launch::running_job_test {
namespace {

TEST(RunningJob, IsFollowedThroughItsRestarts) {
  const testing::TemporaryFolder parent;
  const rendezvous::Environment environment = {{"TMPDIR", parent.path()}};
  const auto executor = make_executor();
  std::optional<JobFolder> attempt(environment);
  const std::string first = attempt->path();
  RunningJob job(*executor, first + "/");
  EXPECT_TRUE(job.follow());
  EXPECT_EQ(job.folder(), first);
  attempt.reset();
  EXPECT_TRUE(job.follow()) << "the launcher, this process, may start another attempt";
  EXPECT_EQ(job.folder(), first);
  attempt.emplace(environment);
  EXPECT_TRUE(job.follow());
  EXPECT_EQ(job.folder(), attempt->path());
}

/// Changes the current folder of this process; the destructor restores it.
class CurrentFolder {
 public:
  explicit CurrentFolder(const std::string& path) { std::filesystem::current_path(path); }
  ~CurrentFolder() {
    std::error_code ignored;
    std::filesystem::current_path(before_, ignored);
  }
  CurrentFolder(const CurrentFolder&) = delete;
  CurrentFolder& operator=(const CurrentFolder&) = delete;

 private:
  const std::filesystem::path before_ = std::filesystem::current_path();
};

TEST(RunningJob, IsFollowedFromARelativeFolder) {
  const testing::TemporaryFolder parent;
  const rendezvous::Environment environment = {{"TMPDIR", parent.path()}};
  const auto executor = make_executor();
  const CurrentFolder current(parent.path());
  for (const std::string before : {"", "./"}) {
    std::optional<JobFolder> attempt(environment);
    RunningJob job(*executor, before + std::filesystem::path(attempt->path()).filename().string());
    attempt.reset();
    attempt.emplace(environment);
    EXPECT_TRUE(job.follow());
    EXPECT_TRUE(std::filesystem::equivalent(job.folder(), attempt->path())) << job.folder();
  }
}

TEST(RunningJob, EndsWithItsLauncher) {
  const testing::TemporaryFolder parent;
  const rendezvous::Environment environment = {{"TMPDIR", parent.path()}};
  const auto executor = make_executor();
  std::array<int, 2> ready{}, done{};
  ASSERT_EQ(pipe(ready.data()), 0);
  ASSERT_EQ(pipe(done.data()), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    close(done[1]);
    const JobFolder folder(environment);
    char byte = 0;
    [[maybe_unused]] auto size = write(ready[1], folder.path().data(), folder.path().size());
    size = read(done[0], &byte, 1);
    _exit(0);
  }
  std::string path(200, '\0');
  path.resize(static_cast<std::size_t>(std::max<ssize_t>(read(ready[0], path.data(), path.size()), 0)));
  RunningJob job(*executor, path);
  EXPECT_TRUE(job.follow());
  EXPECT_EQ(job.folder(), path);
  const JobFolder other(environment);  // of this process, which runs another job
  for (const int descriptor : {done[1], done[0], ready[0], ready[1]}) close(descriptor);
  siginfo_t ended{};
  waitid(P_PID, static_cast<id_t>(launcher), &ended, WEXITED | WNOWAIT);
  EXPECT_FALSE(job.follow()) << "nothing has waited for the process yet";
  EXPECT_EQ(job.folder(), path);
  waitpid(launcher, nullptr, 0);
  EXPECT_FALSE(job.follow());
  EXPECT_FALSE(RunningJob(*executor, parent.path()).follow()) << "not a job";
}

}  // namespace
}  // namespace torchspan::launch::running_job_test
