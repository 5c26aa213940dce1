#include "launch/supervisor/job.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "launch/display/terminal_screen.h"
#include "launch/supervisor/job_fixture.h"

namespace torchspan::launch::job_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Jobs, SucceedWithoutOutputWhenAllWorkersSucceed) {
  EXPECT_EQ(run(3, "echo hello from $RANK of $WORLD_SIZE; echo oops >&2"), 0);
  const std::string all = output();
  for (int rank = 0; rank < 3; ++rank) {
    const std::string number = std::to_string(rank);
    EXPECT_THAT(all, HasSubstr("[worker" + number + "] hello from " + number + " of 3\n"));
    EXPECT_THAT(errors(), HasSubstr("[worker" + number + "] oops\n"));
  }
  EXPECT_EQ(lines_of(all).size(), 3u);
  EXPECT_EQ(lines_of(errors()).size(), 3u);
}

TEST_F(Jobs, GiveTheExitCodeAndLastLinesOfTheFirstFailure) {
  EXPECT_EQ(run(3,
                "if [ $RANK = 1 ]; then for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 42; fi; "
                "exec sleep 1000"),
            42);
  const std::string text = errors();
  EXPECT_THAT(text, HasSubstr("worker1 (rank 1, pid"));
  EXPECT_THAT(text, HasSubstr("exited with code 42; stopping the others\n"));
  EXPECT_THAT(text, HasSubstr("    line 3\n    line 4\n    line 5\n    line 6\n    line 7\n"));
  EXPECT_THAT(text, Not(HasSubstr("    line 2\n")));
  EXPECT_THAT(text, HasSubstr("worker0, worker2: stopped (was killed by SIGTERM)"));
  EXPECT_THAT(text, HasSubstr("exit code: 42\n"));
}

TEST_F(Jobs, NameAWorkerThatWasKilled) {
  EXPECT_EQ(run(2, "if [ $RANK = 1 ]; then echo nearly >&2; kill -9 $$; fi; exec sleep 1000"), 128 + SIGKILL);
  EXPECT_THAT(errors(), AllOf(HasSubstr("worker1 (rank 1, pid"), HasSubstr("was killed by SIGKILL"),
                              HasSubstr("    nearly\n"), HasSubstr("exit code: 137\n")));
}

TEST_F(Jobs, KillAWorkerThatIgnoresTheRequestToStop) {
  JobOptions mine = options(2,
                            "if [ $RANK = 0 ]; then trap '' TERM; echo ready > $FOLDER/ready; "
                            "while :; do sleep 0.05; done; fi; "
                            "while [ ! -s $FOLDER/ready ]; do sleep 0.02; done; exit 3");
  mine.grace = milliseconds(300);
  EXPECT_EQ(run(mine), 3);
  EXPECT_THAT(errors(), HasSubstr("worker0: stopped (was killed by SIGKILL"));
}

TEST_F(Jobs, LetWorkersCleanUpWhenTheyAreStopped) {
  EXPECT_EQ(run(2,
                "if [ $RANK = 0 ]; then trap 'echo cleaned up; exit 0' TERM; echo ready > $FOLDER/ready; "
                "while :; do sleep 0.02; done; fi; "
                "while [ ! -s $FOLDER/ready ]; do sleep 0.02; done; exit 3"),
            3);
  EXPECT_THAT(output(), HasSubstr("[worker0] cleaned up\n"));
}

TEST_F(Jobs, KeepEveryLineOfManyWorkersWhole) {
  constexpr int kWorkers = 4, kLines = 2500;
  EXPECT_EQ(run(kWorkers,
                "i=0; while [ $i -lt 2500 ]; do echo \"line $i of rank $RANK abcdefghijklmnopqrstuvwxyz\"; "
                "i=$((i+1)); done"),
            0);
  std::map<std::string, int> next;
  const auto lines = lines_of(output());
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kWorkers * kLines));
  for (const std::string& line : lines) {
    const std::string rank = line.substr(7, 1);
    EXPECT_EQ(line, "[worker" + rank + "] line " + std::to_string(next[rank]++) + " of rank " + rank +
                        " abcdefghijklmnopqrstuvwxyz");
  }
}

TEST_F(Jobs, SetTheVariablesOfWorkersAndHideTheSecret) {
  EXPECT_EQ(
      run(2,
          "mode() { stat -c %a $1; }; echo $TORCHSPAN_NAME $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR "
          "$OMP_NUM_THREADS $(stat -c '%a %s' $TORCHSPAN_SECRET_FILE) $(mode $(dirname "
          "$TORCHSPAN_SECRET_FILE)) "
          "$(mode $TORCHSPAN_RUNTIME_DIR); test $MASTER_PORT -gt 1024 && test -n \"$TORCHSPAN_RUN_ID\""),
      0);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker0] worker0 0 2 127.0.0.1 1 600 65 700 700\n"),
                              HasSubstr("[worker1] worker1 1 2 127.0.0.1 1 600 65 700 700\n")));
  EXPECT_EQ(errors(), "");
}

TEST_F(Jobs, PassArgumentsAndVariablesAsTheyAre) {
  JobOptions mine = options(1, "");
  mine.command = {"/bin/sh", "-c",        "for a in \"$@\"; do echo \"<$a>\"; done; echo \"$GREETING\"",
                  "name",    "two words", "",
                  "a'b\"c",  "$HOME *",   "--flag=x"};
  mine.extra = {{"GREETING", "hello  world=1"}};
  mine.name_prefix = "trainer";
  EXPECT_EQ(run(mine), 0);
  EXPECT_EQ(output(),
            "[trainer0] <two words>\n[trainer0] <>\n[trainer0] <a'b\"c>\n[trainer0] <$HOME *>\n[trainer0] "
            "<--flag=x>\n"
            "[trainer0] hello  world=1\n");
}

TEST_F(Jobs, ReportTheThreadsPerWorkerOnce) {
  JobOptions mine = options(2, "echo threads $OMP_NUM_THREADS");
  mine.environment.erase("OMP_NUM_THREADS");
  EXPECT_EQ(run(mine), 0);
  EXPECT_THAT(lines_of(errors()), ::testing::ElementsAre(HasSubstr("OMP_NUM_THREADS=")));
  EXPECT_THAT(output(), HasSubstr("[worker0] threads "));
}

TEST_F(Jobs, RejectImpossibleJobs) {
  const auto error_text = [&](const JobOptions& options) -> std::string {
    try {
      run_job(*executor_, options);
    } catch (const Error& error) {
      EXPECT_EQ(leftovers(), 0);
      return error.message();
    }
    return "nothing was thrown";
  };
  JobOptions missing = options(2, "");
  missing.command = {"./no-such-program"};
  EXPECT_THAT(error_text(missing), HasSubstr("./no-such-program"));
  std::ofstream(folder_ + "/noise") << "\x7f"
                                       "ELF but not really";
  std::filesystem::permissions(folder_ + "/noise", std::filesystem::perms::owner_all);
  JobOptions noise = options(2, "");
  noise.command = {folder_ + "/noise"};
  EXPECT_THAT(error_text(noise), HasSubstr("cannot be started"));
  EXPECT_THAT(error_text(options(0, "")), HasSubstr("number of workers is 0"));
  JobOptions nothing = options(1, "");
  nothing.command.clear();
  EXPECT_THAT(error_text(nothing), HasSubstr("no program"));
  JobOptions log = options(1, "");
  log.log_folder = folder_ + "/noise/logs";
  EXPECT_THAT(error_text(log), HasSubstr("folder for logs"));
  EXPECT_EQ(output() + errors(), "");
}

TEST_F(Jobs, KeepLogsPerWorkerWhenAsked) {
  JobOptions mine = options(2, "echo out $RANK; printf 'err %s without newline' $RANK >&2");
  mine.log_folder = folder_ + "/deep/logs";
  EXPECT_EQ(run(mine), 0);
  EXPECT_EQ(file("deep/logs/worker0.out.log"), "out 0\n");
  EXPECT_EQ(file("deep/logs/worker1.out.log"), "out 1\n");
  EXPECT_EQ(file("deep/logs/worker1.err.log"), "err 1 without newline");
  EXPECT_THAT(errors(), HasSubstr("[worker1] err 1 without newline\n"));
}

TEST_F(Jobs, ShowTheProgressOfTheirWorkers) {
  JobOptions mine = options(2,
                            "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; "
                            "echo torchspan-progress 1 epoch=1/2 step=3/4 rate=100 unit=images >&9");
  EXPECT_EQ(run(mine), 0);
  EXPECT_THAT(errors(), HasSubstr("torchspan: epoch 1/2  step 3/4  100 images/s | done 0,1\n"));
}

TEST_F(Jobs, ShowWorkersTheyStoppedAsStopped) {
  JobOptions mine = options(3,
                            "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; echo torchspan-progress 1 step=3/4 "
                            ">&9; if [ $RANK = 1 ]; then sleep 0.2; exit 3; fi; exec sleep 1000");
  EXPECT_EQ(run(mine), 3);
  EXPECT_THAT(errors(), HasSubstr("step 3/4 | failed 1, stopped 0,2\n"));
}

TEST_F(Jobs, DrawALiveBlockOnATerminal) {
  JobOptions mine =
      options(1,
              "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; echo torchspan-progress 1 step=3/4 >&9; "
              "while [ ! -e $FOLDER/drawn ]; do sleep 0.02; done; echo hello");
  ASSERT_EQ(pipe(alive_.data()), 0);
  mine.display = {.output = errors_.descriptor(),
                  .errors = errors_.descriptor(),
                  .output_terminal = true,
                  .errors_terminal = true};
  const pid_t launcher = launch(mine);
  wait_for_error("step 3/4 | running 0");
  std::ofstream(folder_ + "/drawn") << "now";
  EXPECT_EQ(code_of(launcher), 0);
  close(alive_[0]);
  EXPECT_THAT(errors(), AllOf(HasSubstr("\x1b[?7lstep 3/4 | running 0\x1b[K"),
                              HasSubstr("\x1b[J[worker0] hello\n\x1b[?7lstep 3/4 | running 0\x1b[K")));
  TerminalScreen screen(80, 24, true);
  screen.write(errors());
  EXPECT_EQ(screen.lines(), (std::vector<std::string>{"[worker0] hello", "torchspan: step 3/4 | done 0"}));
}

TEST_F(Jobs, EndEvenIfAWorkerLeavesAProcessBehind) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  EXPECT_EQ(run(2, "sleep 1000 &"), 0);
  close(alive_[1]);
  EXPECT_EQ(heard(true), "");  // returns only when no process is left
  close(alive_[0]);
}

/// Sets what this process does at a signal; the destructor restores it.
class SignalAction {
 public:
  SignalAction(int signal, sighandler_t action) : signal_(signal), before_(std::signal(signal, action)) {}
  ~SignalAction() { std::signal(signal_, before_); }
  SignalAction(const SignalAction&) = delete;
  SignalAction& operator=(const SignalAction&) = delete;

 private:
  const int signal_;
  const sighandler_t before_;
};

/// Sets this process's limit of open files; the destructor restores it.
class OpenFilesLimit {
 public:
  explicit OpenFilesLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit low{limit, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &low);
  }
  ~OpenFilesLimit() { setrlimit(RLIMIT_NOFILE, &before_); }
  OpenFilesLimit(const OpenFilesLimit&) = delete;
  OpenFilesLimit& operator=(const OpenFilesLimit&) = delete;

  static rlim_t current() {
    rlimit now{};
    getrlimit(RLIMIT_NOFILE, &now);
    return now.rlim_cur;
  }

 private:
  rlimit before_{};
};

/// Fails each wait from the moment at which a file exists.
class FailingPoller final : public Poller {
 public:
  FailingPoller(Executor& executor, std::string file)
      : executor_(executor), real_(executor.make_poller()), file_(std::move(file)) {}
  void add(int fd, std::uint64_t token, bool writable) override { real_->add(fd, token, writable); }
  void change(int fd, std::uint64_t token, bool writable) override { real_->change(fd, token, writable); }
  void remove(int fd) override { real_->remove(fd); }
  std::size_t wait(std::span<Event> events, Deadline deadline) override {
    if (std::filesystem::exists(file_)) throw std::runtime_error("the system failed");
    return real_->wait(events, earlier(deadline, executor_.deadline_in(milliseconds(20))));
  }
  void wake() override { real_->wake(); }
  int descriptor() const override { return real_->descriptor(); }

 private:
  Executor& executor_;
  const std::unique_ptr<Poller> real_;
  const std::string file_;
};

/// The system's executor, except that its pollers fail when a file exists.
class FailingExecutor final : public Executor {
 public:
  FailingExecutor(Executor& real, std::string file) : real_(real), file_(std::move(file)) {}
  TimePoint now() const override { return real_.now(); }
  std::unique_ptr<Parker> make_parker() override { return real_.make_parker(); }
  std::unique_ptr<Poller> make_poller() override { return std::make_unique<FailingPoller>(real_, file_); }
  Thread spawn(std::string name, std::function<void()> body) override {
    return real_.spawn(std::move(name), std::move(body));
  }
  void yield() override { real_.yield(); }
  Duration spin_limit() const override { return real_.spin_limit(); }

 private:
  Executor& real_;
  const std::string file_;
};

TEST_F(Jobs, LeaveNoProcessBehindAfterAnUnexpectedError) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  JobOptions mine = options(1, "setsid sh -c ': >$FOLDER/failure; exec sleep 1000' & exec sleep 1000");
  FailingExecutor failing(*executor_, folder_ + "/failure");
  EXPECT_THROW(run_job(failing, std::move(mine)), std::runtime_error);
  close(alive_[1]);
  EXPECT_TRUE(all_gone()) << "the process in another session runs";
  close(alive_[0]);
  EXPECT_EQ(leftovers(), 0);
}

TEST_F(Jobs, OutliveTheirTerminalUnderNohup) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  const JobOptions mine = options(1, "echo ready >/dev/fd/" + std::to_string(alive_[1]) +
                                         "; while [ ! -e $FOLDER/done ]; do sleep 0.02; done; echo complete");
  const pid_t launcher = [&] {
    const SignalAction ignored(SIGHUP, SIG_IGN);  // as nohup does
    return launch(mine);
  }();
  wait_for_lines(1);
  kill(launcher, SIGHUP);
  std::ofstream(folder_ + "/done") << "now";
  EXPECT_EQ(code_of(launcher), 0);
  EXPECT_EQ(output(), "[worker0] complete\n");
  EXPECT_EQ(errors(), "");
  EXPECT_TRUE(all_gone());
  close(alive_[0]);
}

TEST_F(Jobs, EndAlsoIfTheParentProcessIgnoresTheEndsOfItsChildren) {
  const SignalAction ignored(SIGCHLD, SIG_IGN);
  EXPECT_EQ(run(2, "[ $RANK = 0 ] || exit 3; exec sleep 1000"), 3);
  struct sigaction now {};
  ASSERT_EQ(sigaction(SIGCHLD, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_IGN) << "it is as before";
}

TEST_F(Jobs, HaveMoreWorkersThanTheLimitOfOpenFilesAllowsByDefault) {
  constexpr int kWorkers = 16, kLimit = 48;
  {
    const OpenFilesLimit low(kLimit);
    EXPECT_EQ(run(kWorkers, "ulimit -S -n"), 0) << errors();
    EXPECT_EQ(OpenFilesLimit::current(), static_cast<rlim_t>(kLimit));
  }
  const auto lines = lines_of(output());
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kWorkers));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, ::testing::EndsWith("] " + std::to_string(kLimit))) << "workers have the usual limit";
  }
}

TEST_F(Jobs, DieWithTheirLauncher) {
  JobOptions mine = options(3, "");
  ASSERT_EQ(pipe(alive_.data()), 0);
  mine.command = {"/bin/sh", "-c",
                  "echo started >/dev/fd/" + std::to_string(alive_[1]) + "; exec sleep 1000"};
  const pid_t launcher = fork();
  if (launcher == 0) {
    close(alive_[0]);
    run_job(*make_executor(), mine);
    _exit(0);
  }
  close(alive_[1]);
  std::string started;
  while (std::count(started.begin(), started.end(), '\n') < 3) started += heard(false);
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_EQ(heard(true), "");  // returns only when the last worker has ended
  close(alive_[0]);
}

TEST_F(Jobs, RemoveTheSecretOfALauncherThatWasKilled) {
  JobOptions mine = options(1, "");
  ASSERT_EQ(pipe(alive_.data()), 0);
  mine.command = {"/bin/sh", "-c",
                  "echo started >/dev/fd/" + std::to_string(alive_[1]) + "; exec sleep 1000"};
  const pid_t launcher = fork();
  if (launcher == 0) {
    run_job(*make_executor(), mine);
    _exit(0);
  }
  heard(false);
  EXPECT_EQ(leftovers(), 1);
  EXPECT_EQ(run_job(*executor_, options(1, "exit 0")), 0);
  EXPECT_EQ(leftovers(), 1) << "a job removed the folder of another one that runs";
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  close(alive_[1]);
  EXPECT_EQ(heard(true), "");
  EXPECT_EQ(leftovers(), 1);
  EXPECT_EQ(run_job(*executor_, options(1, "exit 0")), 0);
  EXPECT_EQ(leftovers(), 0) << "the folder of a launcher that is gone is still there";
  close(alive_[0]);
}

/// Worker 1 fails at once because worker 0, whose process id it knows, has ended.
constexpr const char* kBlameWorker0 =
    "if [ $RANK = 1 ]; then while [ ! -s $FOLDER/pid ]; do sleep 0.02; done; "
    "echo \"torchspan[worker1] warning: worker0 (rank 0, pid $(cat $FOLDER/pid) on host) died: its process "
    "ended without a goodbye\" >&2; i=0; while [ $i -lt 20 ]; do echo \"  frame $i\" >&2; i=$((i+1)); done; "
    "exit 5; fi; if [ $RANK = 0 ]; then echo $$ > $FOLDER/new; mv $FOLDER/new $FOLDER/pid; fi; ";

TEST_F(Jobs, WaitForTheExitCodeOfAnEndingWorker) {
  EXPECT_EQ(
      run(3, std::string(kBlameWorker0) + "if [ $RANK = 2 ]; then exec sleep 1000; fi; sleep 0.5; exit 7"),
      7);
  EXPECT_THAT(errors(), AllOf(HasSubstr("worker0 (rank 0, pid"), HasSubstr("exited with code 7; stopping"),
                              HasSubstr("worker1: failed because of it (exited with code 5)"),
                              HasSubstr("exit code: 7\n")));
}

TEST_F(Jobs, ReportAWorkerThatEndedWithoutShutdown) {
  EXPECT_EQ(run(2, std::string(kBlameWorker0) + "sleep 0.5; exit 0"), 5);
  EXPECT_THAT(errors(), AllOf(HasSubstr("first failure: worker0 (rank 0, pid"),
                              HasSubstr("exited with code 0 without shutdown()"),
                              HasSubstr("worker1: failed because of it (exited with code 5)"),
                              HasSubstr("exit code: 5\n")));
}

TEST_F(Jobs, DoNotBlameAWorkerForTheSignalThatStoppedIt) {
  JobOptions mine = options(2, std::string(kBlameWorker0) + "exec sleep 1000");
  mine.grace = milliseconds(300);
  EXPECT_EQ(run(mine), 5);
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("worker0 (rank 0, pid"),
                    HasSubstr("has left the job, but its process still runs 0.3 s later"),
                    HasSubstr("first failure: worker1"),
                    HasSubstr("worker0: stopped (was killed by SIGTERM)"), HasSubstr("exit code: 5\n")));
}

TEST_F(Jobs, FailWhenTheirOutputIsLost) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  JobOptions mine = options(1, "echo precious; echo more; echo oops >&2");
  mine.display.output = full;
  EXPECT_EQ(run(mine), kLostOutput);
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("torchspan: standard output cannot be written: No space left on device"),
                    HasSubstr("[worker0] oops\n"),
                    HasSubstr("torchspan: 2 lines of the output could not be written: No space left")));
  JobOptions failing = options(1, "echo precious; exit 9");
  failing.display.output = full;
  EXPECT_EQ(run(failing), 9);
  close(full);
}

TEST_F(Jobs, SayOnceThatTheyMakeNoProgress) {
  // Two reports, a pause, another report, a longer pause.
  JobOptions mine = options(1, R"(
    exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD
    echo torchspan-progress 1 step=1/9 >&9; echo torchspan-progress 1 step=2/9 >&9
    while [ $(grep -c 'no progress' $FOLDER/said) -lt 1 ]; do sleep 0.02; done
    echo torchspan-progress 1 step=3/9 >&9
    while [ $(grep -c 'no progress' $FOLDER/said) -lt 2 ]; do sleep 0.02; done
    sleep 0.6)");
  const int said = open((folder_ + "/said").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  ASSERT_GE(said, 0);
  mine.display.errors = said;
  mine.no_progress = milliseconds(200);
  EXPECT_EQ(run(mine), 0);
  close(said);
  const std::string text = file("said");
  std::size_t times = 0;
  for (std::size_t at = text.find("torchspan: no progress for 0 s: torchspan stacks /");
       at != std::string::npos; at = text.find("no progress", at + 30)) {
    ++times;
  }
  EXPECT_EQ(times, 2u) << text;
}

TEST_F(Jobs, FailWhenALogIsLost) {
  const std::string logs = folder_ + "/logs";
  std::filesystem::create_directory(logs);
  std::filesystem::create_symlink("/dev/full", logs + "/worker0.out.log");
  JobOptions mine = options(1, "echo precious");
  mine.log_folder = logs;
  EXPECT_EQ(run(mine), kLostOutput);
  EXPECT_THAT(errors(),
              HasSubstr("torchspan: a log in '" + logs + "' is not complete: No space left on device\n"));
}

/// Returns the exit code of a launcher that gets `signal` after its two workers, which run `script`, have
/// reported.
class Interruptions : public Jobs {
 protected:
  int code_after(const std::vector<int>& signals, const std::string& script, Duration grace = seconds(5)) {
    JobOptions mine = options(2, "");
    EXPECT_EQ(pipe(alive_.data()), 0);
    mine.grace = grace;
    mine.command = {"/bin/sh", "-c",
                    "ready() { echo ready >/dev/fd/" + std::to_string(alive_[1]) + "; }; " + script};
    const pid_t launcher = fork();
    if (launcher == 0) {
      close(alive_[0]);
      _exit(run_job(*make_executor(), mine));
    }
    close(alive_[1]);
    std::string said;
    while (std::count(said.begin(), said.end(), '\n') < 2) said += heard(false);
    for (const int signal : signals) {
      kill(launcher, signal);
      if (signals.size() > 1) said = heard(false);
    }
    int status = 0;
    waitpid(launcher, &status, 0);
    EXPECT_EQ(heard(true).find("never"), std::string::npos);
    close(alive_[0]);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(leftovers(), 0);
    return WEXITSTATUS(status);
  }
};

TEST_F(Interruptions, ByCtrlCReachTheWorkersAndGive130) {
  EXPECT_EQ(code_after({SIGINT}, "trap 'echo interrupted; exit 0' INT; ready; while :; do sleep 0.02; done"),
            130);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker0] interrupted\n"), HasSubstr("[worker1] interrupted\n")));
  EXPECT_THAT(errors(), HasSubstr("interrupted by SIGINT"));
}

TEST_F(Interruptions, BySigtermGive143) { EXPECT_EQ(code_after({SIGTERM}, "ready; exec sleep 1000"), 143); }

TEST_F(Interruptions, KillWorkersThatIgnoreThemAfterTheGracePeriod) {
  EXPECT_EQ(code_after({SIGINT}, "trap '' INT TERM; ready; while :; do sleep 0.02; done", milliseconds(200)),
            130);
}

TEST_F(Interruptions, TwiceKillSuchWorkersAtOnce) {
  EXPECT_EQ(code_after({SIGINT, SIGINT},
                       "trap 'ready' INT; trap '' TERM; ready; while :; do sleep 0.02; done", seconds(1000)),
            130);
}

}  // namespace
}  // namespace torchspan::launch::job_test
