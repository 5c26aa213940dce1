#include "launch/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/captured.h"

namespace torchspan::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CommandLineTest : public ::testing::Test {
 protected:
  int run(const std::vector<std::string>& arguments) {
    return run_command_line(*executor_, arguments, {{"PATH", "/usr/bin:/bin"}, {"OMP_NUM_THREADS", "1"}},
                            {.output = output_.descriptor(), .errors = errors_.descriptor()});
  }
  std::unique_ptr<Executor> executor_ = make_executor();
  Captured output_, errors_;
};

TEST_F(CommandLineTest, PrintsItsVersion) {
  EXPECT_EQ(run({"version"}), 0);
  EXPECT_THAT(output_.text(), ::testing::MatchesRegex("torchspan [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST_F(CommandLineTest, ExaminesTheMachine) {
  EXPECT_EQ(run({"doctor"}), 0);
  EXPECT_THAT(output_.text(), AllOf(HasSubstr("cores"), HasSubstr("/dev/shm"), HasSubstr("warning")));
}

TEST_F(CommandLineTest, RunsAProgramWithItsOwnOptions) {
  EXPECT_EQ(run({"run", "-n2", "sh", "-c", "echo = $0 $1 $2", "-n", "5", "--help"}), 0);
  EXPECT_THAT(output_.text(),
              AllOf(HasSubstr("[worker0] = -n 5 --help\n"), HasSubstr("[worker1] = -n 5 --help\n")));
}

TEST_F(CommandLineTest, AllowsDashesBeforeTheProgramAndKeepsLaterOnes) {
  EXPECT_EQ(run({"run", "--workers=1", "--", "sh", "-c", "echo \"$@\"", "x", "--", "two words"}), 0);
  EXPECT_EQ(output_.text(), "[worker0] -- two words\n");
}

TEST_F(CommandLineTest, PassesItsOptionsToTheJob) {
  EXPECT_EQ(run({"run", "-n", "1", "--env", "A=1", "--env", "B=x=y z", "--name-prefix", "node",
                 "--master-port", "0", "sh", "-c", "echo $A $B $TORCHSPAN_NAME"}),
            0);
  EXPECT_EQ(output_.text(), "[node0] 1 x=y z node0\n");
}

TEST_F(CommandLineTest, GivesTheJobsExitCode) {
  EXPECT_EQ(run({"run", "-n", "1", "sh", "-c", "exit 17"}), 17);
}

TEST_F(CommandLineTest, RefusesWhatItDoesNotUnderstand) {
  struct Row {
    std::vector<std::string> arguments;
    std::string complaint;
  };
  const std::vector<Row> rows = {
      {{}, "subcommand is required"},
      {{"walk"}, "no command 'walk'; there are: run, version, doctor"},
      {{"run", "-n", "0", "sh"}, "0 not in range"},
      {{"run", "-n", "two", "sh"}, "two"},
      {{"run", "sh"}, "--workers is required"},
      {{"run", "-n", "2"}, "no program to run"},
      {{"run", "-n", "2", "--"}, "no program to run"},
      {{"run", "-n", "2", "--mastr-port", "5", "sh"}, "--mastr-port"},
      {{"run", "-n", "2", "--master-port", "70000", "sh"}, "70000"},
      {{"run", "-n", "2", "--env", "novalue", "sh"}, "NAME=VALUE"},
      {{"run", "-n", "2", "no-such-program"}, "no program 'no-such-program'"},
  };
  for (const Row& row : rows) {
    Captured output, errors;
    const int code = run_command_line(*executor_, row.arguments, {{"PATH", "/usr/bin:/bin"}},
                                      {.output = output.descriptor(), .errors = errors.descriptor()});
    EXPECT_EQ(code, 2) << row.complaint;
    EXPECT_THAT(errors.text(), HasSubstr(row.complaint));
    EXPECT_THAT(errors.text(), ::testing::StartsWith("torchspan: "));
  }
}

TEST_F(CommandLineTest, HelpsOnRequest) {
  EXPECT_EQ(run({"run", "--help"}), 0);
  EXPECT_THAT(output_.text(), AllOf(HasSubstr("--workers"), HasSubstr("--log-dir"), HasSubstr("exit code")));
}

}  // namespace
}  // namespace torchspan::launch
