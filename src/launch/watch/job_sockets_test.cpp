#include <algorithm>
#include <array>
#include <filesystem>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "core/api/observation.h"
#include "launch/supervisor/prepare.h"
#include "launch/watch/diagnosis.h"
#include "launch/watch/running_job.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::launch::job_sockets_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

TEST(JobSockets, AskEveryWorkerAndMarkThoseThatDoNotAnswer) {
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_jobXXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  const auto executor = make_executor();
  const auto runtime = std::make_shared<Runtime>(*executor, "worker0", LogLevel::kOff);
  {
    const Observation observation(
        runtime, {.socket_folder = folder}, identify(*executor, "worker0", 0, 2),
        [](StateDetail) { return R"({"pending":[{"call":"f","to":"worker1","seconds":3}]})"; });
    // A worker that accepts and does not answer, as a stopped one.
    const Descriptor silent(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = folder + "/observe.1";
    path.copy(static_cast<char*>(address.sun_path), path.size());
    ASSERT_EQ(bind(silent.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(listen(silent.get(), 4), 0);
    const auto workers = ask_workers(*executor, folder, 3s);
    ASSERT_EQ(workers.size(), 2u);
    EXPECT_TRUE(workers[0].answers);
    EXPECT_EQ(workers[0].process, getpid());
    ASSERT_EQ(workers[0].pending.size(), 1u);
    EXPECT_EQ(workers[0].pending[0].name, "f");
    EXPECT_FALSE(workers[1].answers);
    EXPECT_EQ(workers[1].rank, 1);
    EXPECT_EQ(workers[1].process, getpid());
    EXPECT_THAT(format_diagnosis(workers), HasSubstr("does not answer"));
  }
  std::filesystem::remove_all(folder);
}

TEST(JobSockets, SayThatAJobBelongsToAnotherUser) {
  constexpr uid_t kNobody = 65534;
  if (geteuid() != 0) GTEST_SKIP() << "only root can run a command as another user";
  std::string name = (std::filesystem::temp_directory_path() / "torchspan.XXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(kNobody) != 0) _exit(1);
    std::string text = "nothing was thrown";
    try {
      find_job(folder, {});
    } catch (const Error& error) {
      text = error.message();
    }
    _exit(write(ends[1], text.data(), text.size()) > 0 ? 0 : 1);
  }
  close(ends[1]);
  std::string text(4096, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(read(ends[0], text.data(), text.size()), 0)));
  close(ends[0]);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_THAT(
      text, HasSubstr("the job in '" + folder + "' belongs to user 0, and this command runs as user 65534"));
  std::filesystem::remove_all(folder);
}

TEST(JobSockets, SayThatThereIsNoSuchJob) {
  const testing::TemporaryFolder parent;
  EXPECT_THAT(testing::error_text([&] {
                find_job("no such job", {{"TMPDIR", parent.path()}});
              }),
              HasSubstr("no job"));
  const auto executor = make_executor();
  EXPECT_THROW(ask_workers(*executor, "/proc/self/fdinfo", 1ms), Error);
}

TEST(JobSockets, FindAJobOnceUnderTwoNamesOfItsFolder) {
  const testing::TemporaryFolder parent, links;
  const std::string link = links.path() + "/link";
  std::filesystem::create_symlink(parent.path(), link);
  const JobFolder job({{"TMPDIR", parent.path()}});
  const std::string end = job.path().substr(job.path().size() - 6);
  for (const std::string& other : {link, parent.path() + "/"}) {
    EXPECT_EQ(find_job(end, {{"XDG_RUNTIME_DIR", parent.path()}, {"TMPDIR", other}}), job.path());
  }
}

TEST(JobSockets, ListSeveralJobsWithTheirLaunchers) {
  const testing::TemporaryFolder parent;
  const rendezvous::Environment environment = {{"TMPDIR", parent.path()}};
  const JobFolder one(environment), other(environment);
  EXPECT_EQ(find_job(one.path().substr(one.path().size() - 6), environment), one.path());
  for (const std::string& name : {std::string(), std::string("no such job")}) {
    const std::string text = testing::error_text([&] { find_job(name, environment); });
    for (const JobFolder* job : {&one, &other}) {
      EXPECT_THAT(text, HasSubstr(fmt::format("\n  {}, process {}: ", job->path(), getpid())));
    }
    EXPECT_THAT(text, HasSubstr("launch_test"));
  }
}

}  // namespace
}  // namespace torchspan::launch::job_sockets_test
