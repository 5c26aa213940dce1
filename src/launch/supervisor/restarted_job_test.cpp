#include <csignal>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sys/resource.h>

#include <torchspan/core/error.h>

#include "launch/supervisor/job_fixture.h"

namespace torchspan::launch::restarted_job_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class RestartedJobs : public Jobs {
 protected:
  JobOptions options(int workers, int restarts, const std::string& script) const {
    JobOptions options = Jobs::options(workers, script);
    options.restarts.most = restarts;
    options.restarts.backoff = milliseconds(1);
    return options;
  }
};

TEST_F(RestartedJobs, SucceedWhenALaterAttemptDoes) {
  EXPECT_EQ(
      run(options(
          2, 3,
          "echo attempt $TORCHSPAN_RESTART_COUNT; if [ $RANK = 1 ] && [ $TORCHSPAN_RESTART_COUNT -lt 2 ]; "
          "then echo broken $TORCHSPAN_RESTART_COUNT >&2; exit 9; fi")),
      0);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker0] attempt 2\n"), HasSubstr("[worker1] attempt 2\n"),
                              Not(HasSubstr("attempt 3"))));
  EXPECT_THAT(errors(), AllOf(HasSubstr("torchspan: attempt 1 failed: worker1 (rank 1, pid"),
                              HasSubstr("attempt 3 with 2 workers starts in 0.0 s"),
                              HasSubstr("earlier attempts\n attempt 1, 2 workers\n  first failure: worker1"),
                              HasSubstr("    broken 0\n attempt 2, 2 workers\n"), HasSubstr("    broken 1\n"),
                              HasSubstr("torchspan: attempt 3 succeeded\n"), Not(HasSubstr("exit code:"))));
}

TEST_F(RestartedJobs, EndWithTheLastFailureWhenNoRestartIsLeft) {
  EXPECT_EQ(run(options(1, 2, "exit $((40 + TORCHSPAN_RESTART_COUNT))")), 42);
  EXPECT_THAT(errors(), AllOf(HasSubstr("exited with code 40"), HasSubstr("exited with code 41"),
                              HasSubstr("  exit code: 42\n"),
                              HasSubstr("not started again: no restart is left (--max-restarts 2)\n")));
}

TEST_F(RestartedJobs, EndEarlyWhenOneFailureRepeatsAtOnce) {
  JobOptions mine = options(1, 50, "echo x >> $FOLDER/attempts; kill -SEGV $$");
  EXPECT_EQ(run(mine), 128 + SIGSEGV);
  EXPECT_EQ(file("attempts"), "x\nx\nx\n");
  EXPECT_THAT(errors(), HasSubstr("the last 3 attempts failed within 10 s of their start with SIGSEGV"));
}

TEST_F(RestartedJobs, AreNotStartedAgainIfTheProgramCannotBeRun) {
  EXPECT_EQ(run(options(1, 50, "echo x >> $FOLDER/attempts; exec no-such-program")), 127);
  EXPECT_EQ(file("attempts"), "x\n");
  JobOptions missing = options(1, 50, "");
  missing.command = {"./no-such-program"};
  EXPECT_THROW(run_job(*executor_, missing), Error);
}

TEST_F(RestartedJobs, EndAllWorkersOfAnAttemptBeforeTheNext) {
  JobOptions mine = options(
      3, 1,
      "if [ $TORCHSPAN_RESTART_COUNT = 0 ]; then "
      "  setsid sleep 1000 & echo $! > $FOLDER/daemon$RANK; "
      "  [ $RANK != 1 ] || {"
      "    while [ ! -s $FOLDER/daemon0 ] || [ ! -s $FOLDER/daemon2 ]; do sleep 0.02; done; exit 3; }; "
      "  exec sleep 1000; "
      "fi; test -s $FOLDER/daemon$RANK && echo checked; "
      "grep -qs 'State:.[RSDT]' /proc/$(cat $FOLDER/daemon$RANK)/status && echo alive; true");
  EXPECT_EQ(run(mine), 0);
  EXPECT_THAT(output(), AllOf(HasSubstr("checked"), Not(HasSubstr("alive"))));
}

TEST_F(RestartedJobs, TellEachAttemptItsVariables) {
  JobOptions mine = options(
      1, 1,
      "echo $TORCHSPAN_RUN_ID $(cat $TORCHSPAN_SECRET_FILE) $TORCHSPAN_RUNTIME_DIR $TORCHELASTIC_ERROR_FILE; "
      "echo = $TORCHSPAN_RESTART_COUNT $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS; "
      "exit $((1 - TORCHSPAN_RESTART_COUNT))");
  mine.environment["TORCHELASTIC_MAX_RESTARTS"] = "77";
  EXPECT_EQ(run(mine), 0);
  EXPECT_THAT(output(), AllOf(HasSubstr("= 0 0 1\n"), HasSubstr("= 1 1 1\n")));
  const std::regex line(R"(\] (\w+) (\w+) (\S+) (\S+)\n)");
  const std::string text = output();
  std::set<std::string> ids, secrets, folders, error_files;
  for (std::sregex_iterator it(text.begin(), text.end(), line), end; it != end; ++it) {
    ids.insert((*it)[1]);
    secrets.insert((*it)[2]);
    folders.insert((*it)[3]);
    error_files.insert((*it)[4]);
  }
  EXPECT_EQ(ids.size(), 1u) << "attempts of one job share its id";
  EXPECT_EQ(secrets.size(), 2u) << "each attempt has its own secret";
  EXPECT_EQ(folders.size(), 2u);
  EXPECT_EQ(error_files.size(), 2u);
}

TEST_F(RestartedJobs, AppendToTheirLogs) {
  JobOptions mine =
      options(1, 1, "echo attempt $TORCHSPAN_RESTART_COUNT; exit $((1 - TORCHSPAN_RESTART_COUNT))");
  mine.log_folder = folder_ + "/logs";
  EXPECT_EQ(run(mine), 0);
  EXPECT_EQ(file("logs/worker0.out.log"), "attempt 0\nattempt 1\n");
}

TEST_F(RestartedJobs, ContinueWithFewerWorkersDownToTheLeast) {
  JobOptions mine = options(4, 1, R"(
    told=$FOLDER/told$TORCHSPAN_RESTART_COUNT
    if [ $RANK = 0 ]; then echo size $WORLD_SIZE $LOCAL_WORLD_SIZE; touch $told; fi
    while [ ! -e $told ]; do sleep 0.02; done
    [ $WORLD_SIZE -le 2 ])");
  mine.least_workers = 2;
  EXPECT_EQ(run(mine), 0);
  std::vector<std::string> sizes;
  for (const auto& line : lines_of(output())) sizes.push_back(line.substr(line.find("size")));
  EXPECT_THAT(sizes, ::testing::ElementsAre("size 4 4", "size 4 4", "size 3 3", "size 2 2"));
  EXPECT_THAT(errors(), HasSubstr("no restart is left (--max-restarts 1); attempt 4 with 2 workers"));
}

TEST_F(RestartedJobs, FailBelowTheLeastNumberOfWorkers) {
  JobOptions mine = options(3, 0, "exit 6");
  mine.least_workers = 2;
  EXPECT_EQ(run(mine), 6);
  EXPECT_THAT(errors(), HasSubstr("not started again: fewer than 2 workers are not allowed"));
  mine.least_workers = 4;
  EXPECT_THROW(run_job(*executor_, mine), Error);
}

TEST_F(RestartedJobs, ContinueWithTheWorkersThatTheSystemCanStart) {
  JobOptions mine = options(3, 0, "echo started of $WORLD_SIZE >/dev/fd/$DONE; exec sleep 0.1");
  mine.least_workers = 1;
  ASSERT_EQ(pipe(alive_.data()), 0);
  mine.extra["DONE"] = std::to_string(alive_[1]);
  const pid_t launcher = fork();
  if (launcher == 0) {
    // Each worker needs four descriptors of the launcher, and five more while it starts.
    rlimit limit{};
    int next = open("/dev/null", O_RDONLY);
    limit.rlim_cur = limit.rlim_max = static_cast<rlim_t>(next) + 20;
    setrlimit(RLIMIT_NOFILE, &limit);
    _exit(run_job(*make_executor(), mine));
  }
  close(alive_[1]);
  EXPECT_EQ(code_of(launcher), 0) << errors();
  EXPECT_THAT(errors(), HasSubstr("only "));
  EXPECT_THAT(errors(), HasSubstr("of 3 workers could be started; attempt 2 with "));
  EXPECT_THAT(heard(true), Not(::testing::EndsWith("started of 3\n")));
  close(alive_[0]);
}

TEST_F(RestartedJobs, DoNotFollowAnInterruption) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  JobOptions mine = options(2, 5, "echo ready >/dev/fd/" + std::to_string(alive_[1]) + "; exec sleep 1000");
  for (const int signal : {SIGTERM}) {
    const pid_t launcher = launch(mine);
    wait_for_lines(2);
    kill(launcher, signal);
    EXPECT_EQ(code_of(launcher), 128 + signal);
    EXPECT_TRUE(all_gone());
  }
  EXPECT_THAT(errors(), Not(HasSubstr("attempt 2")));
}

TEST_F(RestartedJobs, CanBeInterruptedBetweenTwoAttempts) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  JobOptions mine = options(1, 5, "exit 3");
  mine.restarts.backoff = seconds(1000);
  mine.restarts.longest_backoff = seconds(1000);
  mine.preemption.clean_code = 85;
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, std::pair{SIGUSR1, 85}}) {
    Captured errors;
    mine.display.errors = errors.descriptor();
    const pid_t launcher = fork();
    if (launcher == 0) _exit(run_job(*make_executor(), mine));
    while (errors.text().find("starts in 1000.0 s") == std::string::npos) executor_->yield();
    kill(launcher, signal);
    EXPECT_EQ(code_of(launcher), code);
    EXPECT_THAT(errors.text(), HasSubstr("before attempt 2\n"));
  }
  for (const int end : alive_) close(end);
}

TEST_F(RestartedJobs, ShowTheErrorOfAWorkerAndPassItOn) {
  JobOptions mine =
      options(2, 0,
              "[ $RANK = 1 ] || exec sleep 1000; echo '{\"message\": {\"message\": \"ValueError: bad "
              "batch\", \"extraInfo\": {\"py_callstack\": \"Traceback\", \"timestamp\": \"17\"}}}' > "
              "$TORCHELASTIC_ERROR_FILE; exit 3");
  mine.error_file = folder_ + "/error.json";
  EXPECT_EQ(run(mine), 3);
  EXPECT_THAT(errors(), HasSubstr("  its error: ValueError: bad batch\n"));
  const auto passed = nlohmann::json::parse(file("error.json"));
  EXPECT_EQ(passed["message"]["message"], "ValueError: bad batch");
  EXPECT_EQ(passed["message"]["errorCode"], 3);
  EXPECT_EQ(passed["message"]["extraInfo"]["py_callstack"], "Traceback");
}

TEST_F(RestartedJobs, DescribeAFailureWithoutAnErrorFile) {
  JobOptions mine = options(1, 0, "mkfifo $TORCHELASTIC_ERROR_FILE; echo last words >&2; kill -9 $$");
  mine.error_file = folder_ + "/error.json";
  EXPECT_EQ(run(mine), 137);
  const auto passed = nlohmann::json::parse(file("error.json"));
  EXPECT_EQ(passed["message"]["errorCode"], -9);
  EXPECT_THAT(std::string(passed["message"]["message"]), HasSubstr("worker0 (rank 0, pid"));
  EXPECT_THAT(errors(), Not(HasSubstr("its error")));
}

}  // namespace
}  // namespace torchspan::launch::restarted_job_test
