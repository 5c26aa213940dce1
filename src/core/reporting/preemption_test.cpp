#include <array>
#include <atomic>
#include <csignal>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/observation.h>
#include <torchspan/core/preemption.h>
#include <torchspan/detail/core/executor.h>

namespace torchspan::preemption_test {
namespace {

/// Gives the signals their default handling again.
class PreemptionTest : public ::testing::Test {
 protected:
  ~PreemptionTest() override {
    for (const int signal : {SIGUSR1, SIGUSR2, SIGTERM}) std::signal(signal, SIG_DFL);
  }
};

bool readable(int descriptor) {
  pollfd wanted{descriptor, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

TEST_F(PreemptionTest, IsRequestedByASignalToTheProcess) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const Preemption preemption{PreemptionOptions{}};
    EXPECT_FALSE(preemption.requested());
    EXPECT_FALSE(readable(preemption.descriptor()));
    raise(signal);
    EXPECT_TRUE(preemption.requested());
    EXPECT_EQ(preemption.signal(), signal);
    EXPECT_TRUE(readable(preemption.descriptor()));
    raise(signal == SIGTERM ? SIGUSR1 : SIGTERM);
    EXPECT_EQ(preemption.signal(), signal) << "a later signal replaced the first";
  }
}

TEST_F(PreemptionTest, IsSeenByEveryThread) {
  const auto executor = make_executor();
  const Preemption preemption{PreemptionOptions{}};
  std::atomic<bool> seen{false};
  Thread watcher = executor->spawn("watcher", [&] {
    while (!preemption.requested()) executor->yield();
    seen = true;
  });
  kill(getpid(), SIGUSR1);
  watcher.join();
  EXPECT_TRUE(seen);
}

TEST_F(PreemptionTest, DoesNotConcernForkedChildren) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe2(pipe_ends.data(), O_NONBLOCK), 0);
  const Preemption preemption{{.launcher_descriptor = pipe_ends[1]}};
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGTERM);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_FALSE(preemption.requested());
  EXPECT_FALSE(readable(preemption.descriptor())) << "the child shares it";
  EXPECT_FALSE(readable(pipe_ends[0])) << "the launcher would preempt the whole job";
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_F(PreemptionTest, RestoresTheHandlingOfASignalThatIsListedTwice) {
  { const Preemption preemption{{.signals = {SIGUSR2, SIGTERM, SIGUSR2}}}; }
  EXPECT_EXIT(raise(SIGUSR2), ::testing::KilledBySignal(SIGUSR2), "");
}

TEST_F(PreemptionTest, RefusesSignalsThatCannotBeHandled) {
  for (const int signal : {SIGKILL, SIGSTOP, 0, 32, 99}) {
    EXPECT_THROW((Preemption{{.signals = {signal}}}), Error) << signal;
  }
}

TEST_F(PreemptionTest, DoesNotTakeAnotherFileForTheLaunchersPipe) {
  const int file = open("/dev/null", O_WRONLY | O_CLOEXEC);
  setenv("TORCHSPAN_PROGRESS_FD", std::to_string(file).c_str(), 1);
  EXPECT_EQ(PreemptionOptions::from_process().launcher_descriptor, -1);
  EXPECT_EQ(ProgressOptions::from_process().launcher_descriptor, -1);
  unsetenv("TORCHSPAN_PROGRESS_FD");
  EXPECT_EQ(fcntl(file, F_GETFL) & O_NONBLOCK, 0);
  close(file);
}

TEST_F(PreemptionTest, HandlesOnlyTheSignalsOfItsOptions) {
  const Preemption preemption{{.signals = {SIGUSR2}}};
  EXPECT_EXIT(raise(SIGUSR1), ::testing::KilledBySignal(SIGUSR1), "");
  raise(SIGUSR2);
  EXPECT_EQ(preemption.signal(), SIGUSR2);
}

TEST_F(PreemptionTest, RestoresThePreviousHandlers) {
  { const Preemption preemption{PreemptionOptions{}}; }
  struct sigaction now {};
  sigaction(SIGUSR1, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
  EXPECT_EXIT(raise(SIGTERM), ::testing::KilledBySignal(SIGTERM), "");
}

TEST_F(PreemptionTest, IgnoresSignalsAfterItsEndIfOneHadArrived) {
  EXPECT_EXIT(
      {
        {
          const Preemption preemption{PreemptionOptions{}};
          raise(SIGUSR1);
        }
        raise(SIGTERM);
        raise(SIGUSR1);
        _exit(7);
      },
      ::testing::ExitedWithCode(7), "");
}

TEST_F(PreemptionTest, IsOneAtATime) {
  const Preemption preemption{PreemptionOptions{}};
  EXPECT_THROW(Preemption{PreemptionOptions{}}, Error);
  raise(SIGUSR1);
  EXPECT_TRUE(preemption.requested()) << "the rejected object took the handlers away";
}

TEST_F(PreemptionTest, RejectsSignalsThatCannotBeHandled) {
  for (const int signal : {0, -1, SIGKILL, SIGSTOP, 1000}) {
    EXPECT_THROW(Preemption({.signals = {signal}}), Error) << signal;
  }
  EXPECT_NO_THROW(Preemption{PreemptionOptions{}}) << "a rejected object kept the process's place";
}

TEST_F(PreemptionTest, ReportsTheFirstSignalToTheLauncher) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe2(pipe_ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
  {
    const Preemption preemption{{.launcher_descriptor = pipe_ends[1]}};
    raise(SIGTERM);
    raise(SIGTERM);
  }
  std::array<char, 200> bytes;
  const auto got = read(pipe_ends[0], bytes.data(), bytes.size());
  ASSERT_GT(got, 0);
  const std::string line(bytes.data(), static_cast<std::size_t>(got));
  EXPECT_EQ(line, encode_preemption(SIGTERM));
  EXPECT_EQ(decode_preemption(line), SIGTERM);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_F(PreemptionTest, NoticeIsDecodedOrIgnored) {
  EXPECT_EQ(decode_preemption("torchspan-preempted 1 signal=10"), 10);
  for (const char* line :
       {"", "torchspan-preempted 1", "torchspan-preempted 1 signal=", "torchspan-preempted 1 signal=0",
        "torchspan-preempted 1 signal=-1", "torchspan-preempted 1 signal=65536",
        "torchspan-preempted 1 signal=10x", "torchspan-progress 1 step=3"}) {
    EXPECT_FALSE(decode_preemption(line)) << line;
  }
}

TEST_F(PreemptionTest, ReadsTheVariablesOfTheLauncher) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  setenv("TORCHSPAN_PREEMPT_SIGNAL", std::to_string(SIGUSR2).c_str(), 1);
  setenv("TORCHSPAN_PROGRESS_FD", std::to_string(pipe_ends[1]).c_str(), 1);
  const PreemptionOptions options = PreemptionOptions::from_process();
  EXPECT_EQ(options.signals, (std::vector<int>{SIGUSR2, SIGTERM}));
  EXPECT_EQ(options.launcher_descriptor, pipe_ends[1]);
  setenv("TORCHSPAN_PREEMPT_SIGNAL", "USR1", 1);
  EXPECT_THROW(PreemptionOptions::from_process(), Error);
  unsetenv("TORCHSPAN_PREEMPT_SIGNAL");
  unsetenv("TORCHSPAN_PROGRESS_FD");
  EXPECT_TRUE(PreemptionOptions::from_process().signals.empty());
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

}  // namespace
}  // namespace torchspan::preemption_test
