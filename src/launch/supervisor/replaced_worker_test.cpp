#include <csignal>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <regex>

#include <torchspan/core/error.h>

#include "launch/supervisor/job_fixture.h"

namespace torchspan::launch::replaced_worker_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Scripts call `gone`, which waits until file "done" is in the job's folder, and `fail_first CODE`, which
/// ends the first process of a rank only.
constexpr const char* kHelpers =
    "gone() { while [ ! -e $FOLDER/done ]; do sleep 0.02; done; }; "
    "fail_first() { [ $TORCHSPAN_REPLACEMENT_COUNT != 0 ] || exit $1; }; ";

class ReplacedWorkers : public Jobs {
 protected:
  JobOptions options(int workers, int replacements, const std::string& script) const {
    JobOptions options = Jobs::options(workers, kHelpers + script);
    options.restarts.most_replacements = replacements;
    options.restarts.backoff = milliseconds(1);
    return options;
  }
};

TEST_F(ReplacedWorkers, StartAgainWhileTheOthersGoOn) {
  EXPECT_EQ(
      run(options(3, 2,
                  "echo process $TORCHSPAN_REPLACEMENT_COUNT of $RANK in $TORCHSPAN_RESTART_COUNT; "
                  "if [ $RANK = 1 ]; then echo broken >&2; fail_first 9; touch $FOLDER/done; fi; gone")),
      0);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker1] process 0 of 1 in 0\n"),
                              HasSubstr("[worker1] process 1 of 1 in 0\n"),
                              HasSubstr("[worker0] process 0 of 0 in 0\n"), Not(HasSubstr("process 1 of 0")),
                              Not(HasSubstr("process 1 of 2"))));
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("exited with code 9; it starts again in 0.0 s, and the others continue "
                              "(replacement 1 of 2)\n"),
                    HasSubstr("worker1 (rank 1) was replaced once; last failure: pid "),
                    Not(HasSubstr("stopping")), Not(HasSubstr("exit code: "))));
}

TEST_F(ReplacedWorkers, GetTheSameVariablesExceptTheirCountAndErrorFile) {
  EXPECT_EQ(
      run(options(2, 1,
                  "if [ $RANK = 1 ]; then echo $TORCHSPAN_NAME $RANK $MASTER_PORT $TORCHSPAN_RUN_ID $(cat "
                  "$TORCHSPAN_SECRET_FILE) $TORCHSPAN_RUNTIME_DIR $TORCHSPAN_RESTART_COUNT; echo file "
                  "$TORCHELASTIC_ERROR_FILE; fail_first 3; touch $FOLDER/done; fi; gone")),
      0);
  std::vector<std::string> names, files;
  for (const auto& line : lines_of(output()))
    (line.starts_with("[worker1] file") ? files : names).push_back(line);
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(names[0], names[1]);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_NE(files[0], files[1]);
}

TEST_F(ReplacedWorkers, MakeTheAttemptFailWhenNoReplacementIsLeft) {
  JobOptions mine =
      options(3, 2, "[ $RANK != 2 ] || exit $((40 + TORCHSPAN_REPLACEMENT_COUNT)); exec sleep 1000");
  mine.log_folder = folder_ + "/logs";
  EXPECT_EQ(run(mine), 42);
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("stopping the others: no replacement is left (--max-replacements 2)\n"),
                    HasSubstr("worker2 (rank 2) was replaced 2 times; last failure: pid "),
                    HasSubstr("exited with code 41"), HasSubstr("first failure: worker2 (rank 2, pid "),
                    HasSubstr("worker0, worker1: stopped (was killed by SIGTERM)\n"),
                    HasSubstr("  exit code: 42\n")));
}

TEST_F(ReplacedWorkers, CountInAllAttemptsTogether) {
  JobOptions mine =
      options(2, 3,
              "[ $RANK != 1 ] || { echo x >> $FOLDER/processes; exit $((4 + TORCHSPAN_RESTART_COUNT)); }; "
              "exec sleep 1000");
  mine.restarts.most = 1;
  mine.restarts.give_up_after = 0;
  EXPECT_EQ(run(mine), 5);
  EXPECT_EQ(file("processes"), "x\nx\nx\nx\nx\n") << "two attempts and three replacements";
}

TEST_F(ReplacedWorkers, DoNotIncludeRankZero) {
  JobOptions mine = options(2, 5, "[ $RANK != 0 ] || exit $((7 - TORCHSPAN_RESTART_COUNT)); exec sleep 1000");
  mine.restarts.most = 1;
  EXPECT_EQ(run(mine), 6) << "the job is restarted instead";
  EXPECT_THAT(errors(), HasSubstr("stopping the others: worker0 is rank 0, which serves the store"));
}

TEST_F(ReplacedWorkers, AreTheCauseIfRankZeroFailsBecauseOfTheirDeath) {
  JobOptions mine =
      options(2, 5,
              "if [ $RANK = 1 ]; then echo $$ > $FOLDER/pid.new; "
              "[ $TORCHSPAN_REPLACEMENT_COUNT != 0 ] || echo '{\"message\": \"Boom: x\"}' > "
              "$TORCHELASTIC_ERROR_FILE; fail_first_and_say; touch $FOLDER/done; exec sleep 1000; fi; "
              "gone; echo \"worker1 (rank 1, pid $(cat $FOLDER/pid) on vm) died: its process "
              "ended\" >&2; exit 1");
  const std::string say =
      "fail_first_and_say() { [ $TORCHSPAN_REPLACEMENT_COUNT != 0 ] || { mv $FOLDER/pid.new $FOLDER/pid; "
      "echo last words >&2; kill -SEGV $$; }; }; ";
  mine.command.back() = say + mine.command.back();
  mine.error_file = folder_ + "/error.json";
  EXPECT_EQ(run(mine), 128 + SIGSEGV);
  EXPECT_THAT(errors(), AllOf(HasSubstr("first failure: worker1 (rank 1, pid " + lines_of(file("pid")).at(0) +
                                        ") was killed by SIGSEGV"),
                              HasSubstr("  its error: Boom: x\n"), HasSubstr("    last words\n"),
                              HasSubstr("worker0: failed because of it (exited with code 1)"),
                              HasSubstr("worker1: stopped")));
  EXPECT_EQ(nlohmann::json::parse(file("error.json"))["message"]["errorCode"], -SIGSEGV);
}

TEST_F(ReplacedWorkers, LeaveNoProcessToTheirSuccessors) {
  EXPECT_EQ(run(options(3, 1,
                        "if [ $RANK = 1 ] && [ $TORCHSPAN_REPLACEMENT_COUNT = 0 ]; then "
                        "  setsid sleep 1000 & echo $! > $FOLDER/daemon; exit 3; fi; "
                        "if [ $RANK = 2 ]; then setsid sleep 1000 & echo $! > $FOLDER/other; "
                        "  while [ ! -e $FOLDER/done ]; do sleep 0.02; done; fi; "
                        "alive() { grep -qs 'State:.[RSDT]' /proc/$(cat $FOLDER/$1)/status; }; "
                        "if [ $RANK = 1 ]; then while [ ! -s $FOLDER/other ]; do sleep 0.02; done; "
                        "  alive daemon && echo daemon lives; alive other && echo other lives; "
                        "  touch $FOLDER/done; fi; gone")),
            0);
  EXPECT_THAT(output(), AllOf(HasSubstr("[worker1] other lives"), Not(HasSubstr("daemon lives"))));
}

TEST_F(ReplacedWorkers, AppendToTheirLogs) {
  JobOptions mine = options(2, 1,
                            "if [ $RANK = 1 ]; then echo process $TORCHSPAN_REPLACEMENT_COUNT; fail_first 3; "
                            "touch $FOLDER/done; fi; gone");
  mine.log_folder = folder_ + "/logs";
  EXPECT_EQ(run(mine), 0);
  EXPECT_EQ(file("logs/worker1.out.log"), "process 0\nprocess 1\n");
}

TEST_F(ReplacedWorkers, LeaveNoDescriptorsOpenInTheLauncher) {
  constexpr int kReplacements = 15;
  JobOptions mine = options(2, kReplacements,
                            "if [ $RANK = 1 ]; then ls /proc/$PPID/fd | wc -l >> $FOLDER/counts; "
                            "[ $TORCHSPAN_REPLACEMENT_COUNT = 15 ] || exit 3; touch $FOLDER/done; fi; gone");
  mine.restarts.give_up_after = 0;
  mine.restarts.longest_backoff = milliseconds(2);
  mine.log_folder = folder_ + "/logs";
  EXPECT_EQ(run(mine), 0) << errors();
  const auto counts = lines_of(file("counts"));
  ASSERT_EQ(counts.size(), static_cast<std::size_t>(kReplacements + 1));
  EXPECT_LT(std::stoi(counts.back()), std::stoi(counts.front()) + 10) << file("counts");
}

TEST_F(ReplacedWorkers, DoNotStartAfterASignal) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    ASSERT_EQ(pipe(alive_.data()), 0);
    JobOptions mine = options(2, 5, "trap 'exit 0' TERM USR1 INT; [ $RANK != 1 ] || exit 3; gone");
    mine.restarts.backoff = seconds(1000);
    mine.restarts.longest_backoff = seconds(1000);
    mine.preemption.clean_code = 85;
    Captured errors;
    mine.display.errors = errors.descriptor();
    const pid_t launcher = launch(mine);
    while (errors.text().find("it starts again in 1000.0 s") == std::string::npos) executor_->yield();
    kill(launcher, signal);
    EXPECT_EQ(code_of(launcher), signal == SIGINT ? 130 : 85) << "rank 0 ended with 0 after the signal";
    EXPECT_THAT(errors.text(), AllOf(HasSubstr("worker1 is not started again: the job is ending\n"),
                                     HasSubstr("worker1 (rank 1) was not replaced; last failure: pid ")));
    EXPECT_TRUE(all_gone());
    close(alive_[0]);
  }
}

TEST_F(ReplacedWorkers, AreNotNeededAnyMoreWhenRankZeroSucceeds) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  JobOptions mine = options(3, 5, "[ $RANK != 1 ] || exit 3; gone");
  mine.restarts.backoff = seconds(1000);
  mine.restarts.longest_backoff = seconds(1000);
  const pid_t launcher = launch(mine);
  wait_for_error("it starts again in 1000.0 s");
  std::ofstream(folder_ + "/done") << "now";
  EXPECT_EQ(code_of(launcher), 0);
  EXPECT_THAT(errors(), HasSubstr("worker1 (rank 1) was not replaced; last failure: pid "));
  EXPECT_TRUE(all_gone());
  close(alive_[0]);
}

TEST_F(ReplacedWorkers, ThatCannotStartEndTheAttempt) {
  const std::string program = folder_ + "/program";
  std::ofstream(program) << "#!/bin/sh\n[ $RANK != 1 ] || { chmod 600 $0; exit 3; }\nexec sleep 1000\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  JobOptions mine = options(2, 5, "");
  mine.command = {program};
  EXPECT_EQ(run(mine), 3);
  EXPECT_THAT(errors(),
              AllOf(HasSubstr("worker1 cannot be started again: '" + program + "' cannot be started"),
                    HasSubstr("first failure: worker1 (rank 1, pid ")));
}

TEST_F(ReplacedWorkers, DieWithTheirLauncher) {
  ASSERT_EQ(pipe(alive_.data()), 0);
  const std::string say = "echo ready >/dev/fd/" + std::to_string(alive_[1]) + "; ";
  JobOptions mine = options(
      3, 5, "if [ $RANK = 1 ]; then fail_first 3; setsid sleep 1000 & fi; " + say + "exec sleep 1000");
  const pid_t launcher = launch(mine);
  wait_for_lines(3);
  kill(launcher, SIGKILL);
  code_of(launcher);
  EXPECT_TRUE(all_gone());
  close(alive_[0]);
}

}  // namespace
}  // namespace torchspan::launch::replaced_worker_test
