#include "launch/commands/command_line.h"

#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <unistd.h>

#include "core/api/trace_format.h"
#include "launch/captured.h"
#include "tests/support/processes.h"

namespace torchspan::launch::command_line_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

std::string contents(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A file that exists as long as this object.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& text)
      : path_(::testing::TempDir() + "command-line-" + std::to_string(getpid())) {
    std::ofstream(path_) << text;
  }
  ~ScratchFile() { unlink(path_.c_str()); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

class CommandLineTest : public ::testing::Test {
 protected:
  int run(const std::vector<std::string>& arguments) {
    return run_command_line(*executor_, arguments, {{"PATH", "/usr/bin:/bin"}, {"OMP_NUM_THREADS", "1"}},
                            {.output = output_.descriptor(), .errors = errors_.descriptor()});
  }
  /// What a command that succeeds prints.
  std::string output_of(const std::vector<std::string>& arguments) {
    const std::size_t before = output_.text().size();
    EXPECT_EQ(run(arguments), 0) << errors_.text();
    return output_.text().substr(before);
  }
  struct Row {
    std::vector<std::string> arguments;
    std::string error_text;
  };
  void expect_rejected(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      Captured output, errors;
      const int code = run_command_line(*executor_, row.arguments, {{"PATH", "/usr/bin:/bin"}},
                                        {.output = output.descriptor(), .errors = errors.descriptor()});
      EXPECT_EQ(code, 2) << row.error_text;
      EXPECT_THAT(errors.text(), HasSubstr(row.error_text));
      EXPECT_THAT(errors.text(), ::testing::StartsWith("torchspan: "));
    }
  }
  std::unique_ptr<Executor> executor_ = make_executor();
  Captured output_, errors_;
};

TEST_F(CommandLineTest, PrintsItsVersionAndWhatItsBuildUses) {
  EXPECT_EQ(run({"version"}), 0);
  EXPECT_THAT(
      output_.text(),
      ::testing::MatchesRegex(
          "torchspan [0-9]+\\.[0-9]+\\.[0-9]+\n"
          "LibTorch   ([0-9.]+.*|none)\n"
          "compiler   [A-Za-z]+ [0-9.]+, .*\n"
          "OpenSSL    3[0-9.]*\n"
          "options    (static libraries|shared library), UCX (yes|no), IPsec-MB (yes|no), Gloo (yes|no), "
          "MPI (yes|no), CUDA (yes|no)\n"));
}

TEST_F(CommandLineTest, PrintsItsVersionForTheOptionOfMostPrograms) {
  EXPECT_EQ(output_of({"--version"}), output_of({"version"}));
}

TEST_F(CommandLineTest, ExaminesTheMachine) {
  EXPECT_EQ(run({"doctor"}), 0);
  EXPECT_THAT(output_.text(), AllOf(HasSubstr("cores"), HasSubstr("open files"), HasSubstr("warning")));
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

TEST_F(CommandLineTest, RejectsUnknownArgumentsOfRun) {
  expect_rejected({
      {{}, "subcommand is required"},
      {{"walk"}, "unknown command 'walk'; the commands are: run, version, doctor, schedule"},
      {{"run", "-n", "0", "sh"}, "-n 0: expected a number of workers from 1 to 4096"},
      {{"run", "-n", "two", "sh"}, "-n two: expected"},
      {{"run", "-n", "3:2", "sh"}, "-n 3:2: expected"},
      {{"run", "-n", "2", "--max-restarts", "-1", "sh"}, "--max-restarts"},
      {{"run", "-n", "2", "--restart-backoff", "soon", "sh"}, "--restart-backoff soon: expected a time"},
      {{"run", "-n", "2", "--grace", "-1s", "sh"}, "--grace -1s: expected a time"},
      {{"run", "-n", "2", "--preempt-signal", "KILL", "sh"}, "--preempt-signal KILL: expected one of"},
      {{"run", "-n", "2", "--requeue-exit-code", "256", "sh"}, "--requeue-exit-code"},
      {{"run", "-n", "2", "--error-file", "/no/such/folder/e.json", "sh"}, "/no/such/folder"},
      {{"run", "sh"}, "--workers is required"},
      {{"run", "-n", "2"}, "no program to run"},
      {{"run", "-n", "2", "--"}, "no program to run"},
      {{"run", "-n", "2", "--mastr-port", "5", "sh"}, "torchspan run has no option '--mastr-port'"},
      {{"run", "-x", "-n", "2", "sh"}, "torchspan run has no option '-x'"},
      {{"run", "-np", "2", "sh"}, "'-np' is an option of mpirun; torchspan run calls it -n"},
      {{"run", "--nproc-per-node=2", "sh"}, "'--nproc-per-node' is an option of torchrun; torchspan run"},
      {{"run", "--nnodes", "2", "-n", "2", "sh"}, "--nnodes needs --node-rank"},
      {{"run", "-n", "2", "--master-port", "70000", "sh"}, "70000"},
      {{"run", "-n", "2", "--env", "novalue", "sh"}, "NAME=VALUE"},
      {{"run", "-n", "2", "no-such-program"}, "no program 'no-such-program'"},
  });
}

TEST_F(CommandLineTest, RejectsUnknownArgumentsOfSchedule) {
  expect_rejected({
      {{"schedule", "--stages", "2", "--micro-batches", "2"},
       "the name is missing; the schedules are: gpipe, 1f1b"},
      {{"schedule", "gpip", "--stages", "2", "--micro-batches", "2"},
       "unknown schedule 'gpip'; the schedules are: gpipe, 1f1b, interleaved, bfs, forward-only"},
      {{"schedule", "gpipe", "--micro-batches", "2"}, "--stages is required"},
      {{"schedule", "gpipe", "--stages", "2"}, "--micro-batches is required"},
      {{"schedule", "gpipe", "--stages", "0", "--micro-batches", "2"}, "0 not in range"},
      {{"schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--chunks", "2"},
       "1f1b has one chunk per stage; the schedules for --chunks 2 are: gpipe, interleaved, bfs, "
       "forward-only"},
      {{"schedule", "interleaved", "--stages", "4", "--micro-batches", "6", "--chunks", "2"},
       "micro_batches is 6, which is not a multiple of the 4 ranks; use 4 or 8"},
      {{"schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--forward", "-1"},
       "--forward -1: from 0"},
      {{"schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--transfer", "nan"}, "--transfer nan"},
      {{"schedule", "zbv", "--stages", "2", "--micro-batches", "2", "--chunks", "3"},
       "zero_bubble_v: stages_per_rank is 3; this schedule has two stages per rank"},
      {{"schedule", "zb-h1", "--stages", "2", "--micro-batches", "2", "--chunks", "2"},
       "zb-h1 has one chunk per stage; the schedules for --chunks 2 are: gpipe"},
      {{"schedule", "dualpipev", "--stages", "2", "--micro-batches", "3"}, "2 ranks need at least 4"},
      {{"schedule", "zero-bubble", "--stages", "2", "--micro-batches", "3", "--memory", "0.5"},
       "memory_limit is 0.5; one micro-batch needs 1"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--memory", "-1"}, "--memory -1"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--memory", "1GiB"},
       "--memory 1GiB: the costs do not say how many bytes"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--chunks", "2"}, "remove --chunks"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--costs", "1,2"},
       "--costs has 2 numbers; expected FORWARD,INPUT_GRADIENT,WEIGHT_GRADIENT"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--costs", "1,2,-3"},
       "--costs -3: from 0"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--weight-input", "2"},
       "--weight-input 2: expected from 0 to 1"},
      {{"schedule", "best", "--stages", "2", "--micro-batches", "3", "--costs-file", "/no/such.json"},
       "--costs-file /no/such.json: No such file"},
      {{"schedule", "--csv", "/no/such.csv"}, "--csv /no/such.csv: No such file"},
      {{"schedule", "zbv", "--csv", "/no/such.csv"}, "remove the name 'zbv', or use --csv-out to write"},
      {{"schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--csv-out", "/no/such/plan.csv"},
       "--csv-out /no/such/plan.csv: No such file"},
      {{"schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--out", "/no/such/folder/plan.svg"},
       "--out /no/such/folder/plan.svg: No such file"},
  });
}

TEST_F(CommandLineTest, RejectsTooShortPausesOfTop) {
  expect_rejected({{{"top", "--every", "0"}, "--every 0: expected 100ms or more"},
                   {{"top", "--every", "often"}, "--every often: expected a time"}});
}

TEST_F(CommandLineTest, ShowsAScheduleAsTextAndInFigures) {
  EXPECT_EQ(run({"schedule", "1f1b", "--stages", "2", "--micro-batches", "3"}), 0);
  EXPECT_EQ(output_.text(),
            "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
            "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n"
            "\n"
            "1f1b: a step of 3 micro-batches takes 12 ms; the ranks are idle for 25.0 % of it\n"
            "rank  idle          peak (activations of a micro-batch on a rank)\n"
            "0     3 ms          2\n"
            "1     3 ms          1\n");
}

TEST_F(CommandLineTest, SimulatesASchedulesChunksAndCosts) {
  // Two chunks of 1.5 + 2.5 ms and an idle time of (ranks - 1) such chunks; a hop of 0.25 ms from rank to
  // rank.
  EXPECT_EQ(run({"schedule", "bfs", "--stages", "2", "--micro-batches", "4", "--chunks", "2", "--forward",
                 "3", "--backward", "5"}),
            0);
  EXPECT_THAT(output_.text(),
              AllOf(HasSubstr("2F0"), HasSubstr("takes 36 ms"), HasSubstr("0     4 ms          4\n")));
  EXPECT_EQ(run({"schedule", "forward-only", "--stages", "2", "--micro-batches", "4", "--transfer", "0.25"}),
            0);
  EXPECT_THAT(output_.text(), HasSubstr("takes 5.25 ms"));
}

TEST_F(CommandLineTest, DrawsEveryScheduleIntoAFile) {
  const std::string file = ::testing::TempDir() + "schedule-" + std::to_string(getpid()) + ".svg";
  for (const std::string name : {"gpipe", "1f1b", "interleaved", "bfs", "forward-only", "zb-h1", "zb-h2",
                                 "interleaved-zb", "zbv", "dualpipev", "zero-bubble"}) {
    EXPECT_EQ(run({"schedule", name, "--stages", "4", "--micro-batches", "8", "--out", file}), 0);
    EXPECT_THAT(output_.text(), HasSubstr("drawn in " + file));
    std::ifstream written(file);
    const std::string svg{std::istreambuf_iterator<char>(written), {}};
    EXPECT_THAT(svg, AllOf(::testing::StartsWith("<svg"), HasSubstr(">" + name + ": "),
                           ::testing::EndsWith("</svg>\n")));
    unlink(file.c_str());
  }
}

TEST_F(CommandLineTest, ShowsSplitBackwardsAndWhatTheyKeep) {
  EXPECT_EQ(run({"schedule", "zb-h2", "--stages", "2", "--micro-batches", "3", "--costs", "1,1,1"}), 0);
  EXPECT_EQ(output_.text(),
            "rank 0  F0 F1 F2 I0 W0 I1 W1 I2 W2 .\n"
            "rank 1  .  F0 I0 F1 I1 F2 I2 W0 W1 W2\n"
            "\n"
            "zb-h2: a step of 3 micro-batches takes 10 ms; the ranks are idle for 10.0 % of it\n"
            "repeated without a barrier: 9 ms per step; the ranks are idle for 0.0 % of it\n"
            "rank  idle          peak (activations of a micro-batch on a rank; in brackets: kept for weight "
            "gradients)\n"
            "0     1 ms          3 (1)\n"
            "1     1 ms          3 (3)\n");
}

TEST_F(CommandLineTest, RanksSchedulesByCostsAndMemory) {
  const ScratchFile costs(R"({"stages": [{"forward": 2, "input_gradient": 2, "weight_gradient": 2}]})");
  for (const std::vector<std::string>& given :
       {std::vector<std::string>{"--costs", "2,2,2"}, {"--costs-file", costs.path()}}) {
    std::vector<std::string> arguments = {"schedule",        "best", "--stages", "4",
                                          "--micro-batches", "8",    "--memory", "4"};
    arguments.insert(arguments.end(), given.begin(), given.end());
    EXPECT_THAT(output_of(arguments), AllOf(ContainsRegex("zbv +2 +51 ms +5.9 % +48 ms +0.0 % +4 4 4 4\n"),
                                            ContainsRegex("1f1b +1 +66 ms +27.3 % +66 ms +27.3 % +4 3 2 1\n"),
                                            ContainsRegex("zb-h2 .* 7 7 7 7  more than --memory\n"),
                                            HasSubstr("\nzbv: a step of 8 micro-batches takes 51 ms")));
  }
}

TEST_F(CommandLineTest, RanksSchedulesByMemoryInBytes) {
  const ScratchFile costs(
      R"({"memory": "bytes", "stages": [{"forward": 2, "backward": 4, "activation": 1572864}]})");
  EXPECT_THAT(output_of({"schedule", "best", "--stages", "4", "--micro-batches", "8", "--memory", "6MiB",
                         "--costs-file", costs.path()}),
              AllOf(ContainsRegex("1f1b .* 6 MiB, 4.5 MiB, 3 MiB, 1.5 MiB\n"),
                    ContainsRegex("gpipe .* 12 MiB, 12 MiB, 12 MiB, 12 MiB  more than --memory\n"),
                    HasSubstr("peak (bytes")));
}

TEST_F(CommandLineTest, WritesAndReadsThePeersFiles) {
  const std::string file = ::testing::TempDir() + "schedule-" + std::to_string(getpid()) + ".csv";
  const std::string copy = file + ".copy";
  const std::string shown =
      output_of({"schedule", "zbv", "--stages", "2", "--micro-batches", "4", "--csv-out", file});
  EXPECT_THAT(shown, HasSubstr("written to " + file));
  // The same grid; the name is the file's.
  const std::string again = output_of({"schedule", "--csv", file, "--csv-out", copy});
  EXPECT_THAT(again, ::testing::StartsWith(shown.substr(0, shown.find("\n\n"))));
  EXPECT_THAT(again, HasSubstr(file + ": a step of 4 micro-batches"));
  EXPECT_EQ(contents(copy), contents(file));
  unlink(file.c_str());
  unlink(copy.c_str());
}

TEST_F(CommandLineTest, HelpsOnRequest) {
  EXPECT_EQ(run({"run", "--help"}), 0);
  EXPECT_THAT(output_.text(), AllOf(HasSubstr("--workers"), HasSubstr("--log-dir"), HasSubstr("exit code"),
                                    HasSubstr("Usage: torchspan run [OPTIONS] [PROGRAM...]"),
                                    HasSubstr("The program and its arguments")));
}

TEST_F(CommandLineTest, PrintsNamesInTracesWithoutControlCharacters) {
  const testing::TemporaryFolder folder;
  TraceEncoder encoder;
  TraceIdentity identity;
  identity.name = "worker\x1b[2J\t0";
  identity.host = "node";
  encoder.identity(identity);
  const Bytes bytes = encoder.take();
  std::ofstream(folder.path() + "/w.trace", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  EXPECT_THAT(output_of({"report", folder.path(), "-o", folder.path() + "/run.html"}),
              HasSubstr("note: worker [2J 0 (rank 0, node) did not end its trace"));
  EXPECT_EQ(run({"trace", folder.path(), "-o", folder.path()}), 2);
  EXPECT_THAT(errors_.text(), HasSubstr("--out " + folder.path() + " cannot be written: Is a directory"));
}

TEST_F(CommandLineTest, ReportsErrorsOfTheSystem) {
  const std::filesystem::path before = std::filesystem::current_path();
  {
    const testing::TemporaryFolder folder;
    std::filesystem::current_path(folder.path());
  }
  EXPECT_EQ(run({"run", "-n", "1", "--trace", "traces", "true"}), 1) << "the current folder was removed";
  std::filesystem::current_path(before);
  EXPECT_THAT(errors_.text(),
              AllOf(::testing::StartsWith("torchspan: an unexpected error ended 'torchspan run': "),
                    HasSubstr("No such file or directory"), HasSubstr("; check the current folder")));
}

TEST_F(CommandLineTest, PrintsErrorsWithoutControlCharacters) {
  EXPECT_EQ(run({"report", "/no\x1b[2J", "-o", "x"}), 2);
  EXPECT_THAT(errors_.text(), HasSubstr("torchspan: folder '/no [2J' cannot be read"));
  EXPECT_EQ(run({"version", "--\x1b[2J"}), 2);
  EXPECT_EQ(errors_.text().find('\x1b'), std::string::npos);
}

TEST_F(CommandLineTest, PrintsSummariesAsErrorsIfItsOutputIsTheFile) {
  const testing::TemporaryFolder folder;
  TraceEncoder encoder;
  encoder.identity({});
  const Bytes bytes = encoder.take();
  std::ofstream(folder.path() + "/w.trace", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  const std::string file = folder.path() + "/out";
  for (const std::string command : {"trace", "report"}) {
    {
      const Redirected redirected(STDOUT_FILENO, file);
      redirected.write("earlier\n");
      EXPECT_EQ(run({command, folder.path(), "-o", "/dev/stdout"}), 0);
    }
    EXPECT_THAT(contents(file), ::testing::StartsWith("earlier\n"));
    EXPECT_GT(contents(file).size(), 20u);
    EXPECT_EQ(output_.text(), "");
  }
  EXPECT_THAT(errors_.text(),
              AllOf(::testing::StartsWith("/dev/stdout: "), HasSubstr("did not end its trace")));
}

TEST_F(CommandLineTest, FailsWhenItsOutputCannotBeWritten) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  const std::vector<std::vector<std::string>> commands = {
      {"version"},
      {"doctor"},
      {"run", "--help"},
      {"schedule", "1f1b", "--stages", "2", "--micro-batches", "3"}};
  for (const auto& command : commands) {
    Captured errors;
    EXPECT_EQ(run_command_line(*executor_, command, {}, {.output = full, .errors = errors.descriptor()}),
              kLostOutput);
    EXPECT_THAT(errors.text(), HasSubstr("could not be written: No space left on device\n"));
  }
  close(full);
}

}  // namespace
}  // namespace torchspan::launch::command_line_test
