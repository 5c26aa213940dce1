// Jobs under `torchspan run` that get stuck: the launcher names the cause, in a page and in its summary. And a slow job
// on a terminal: the live block names the straggler.
#include <array>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <pty.h>
#include <sys/ioctl.h>

#include <ATen/ATen.h>

#include <torchspan/core/observation.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "launch/display/terminal_screen.h"
#include "tests/support/cluster_main.h"

namespace torchspan::stuck_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Process;
using testing::TemporaryFolder;

/// Longer than any of these jobs: the launcher ends the worker before.
constexpr Duration kForever = seconds(120);
constexpr Duration kLimit = seconds(3);

std::int64_t leaf(std::int64_t value) { return value; }
constexpr Function<leaf> kLeaf{"leaf"};
/// Never answers.
Future<std::int64_t> never(Worker& worker) {
  // Never completed: its promise lives as long as the process.
  auto* promise = new Promise<std::int64_t>(worker.backend()->continuations());
  return promise->future();
}
constexpr Function<never> kNever{"never"};
/// Waits for its caller.
std::int64_t call_back(Worker& worker, std::int64_t caller) {
  return worker.with({.timeout = kLimit - seconds(1)}).rpc_sync(static_cast<int>(caller), kNever);
}
constexpr Function<call_back> kCallBack{"call_back"};

FunctionTable functions() { return FunctionTable().add(kLeaf, kNever, kCallBack); }

/// Rank 1 never calls the operation that the others are in.
void missing_rank() {
  Session session = Session(WorkerOptions::from_env());
  const collective::Group group = session.group({.timeout = kLimit});
  for (int i = 0; i < 3; ++i) {
    at::Tensor sum = at::ones({4});
    group.all_reduce(sum).wait();
  }
  if (session.rank() == 1) {
    const Span span(session, "augment");
    session.runtime().executor.sleep(kForever);
  }
  at::Tensor sum = at::ones({4});
  group.all_reduce(sum).wait();
}

/// Rank 0 waits for a message from any rank; no other rank sends one.
void missing_message() {
  Session session = Session(WorkerOptions::from_env());
  const collective::Group group = session.group({.timeout = kLimit});
  if (session.rank() == 0) {
    group.recv(at::zeros({3}), collective::kAnySource, 4).wait();
  } else {
    const Span span(session, session.rank() == 1 ? "augment" : "evaluate");
    session.runtime().executor.sleep(kForever);
  }
}

/// Rank 0 waits for a handler that waits for rank 0. The handler's call times out first, which ends both.
void mutual_calls() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  worker.barrier();
  if (worker.rank() == 0) {
    worker.with({.timeout = kLimit + seconds(7)}).rpc_sync(1, kCallBack, 0);
  } else {
    session.runtime().executor.sleep(kForever);
  }
}

void stopped_process() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  worker.barrier();
  if (worker.rank() == 1) raise(SIGSTOP);
  // Until it stops, rank 1 answers.
  for (;;) worker.with({.timeout = kLimit}).rpc_sync(1, kLeaf, 1);
}

/// Rank 1 computes ten times as long as rank 0 in every step.
void slow_rank() {
  Session session = Session(WorkerOptions::from_env());
  const collective::Group group = session.group();
  Progress progress(session);
  for (std::int64_t step = 1; step <= 60; ++step) {
    session.runtime().executor.sleep(milliseconds(session.rank() == 1 ? 100 : 10));
    group.barrier();
    if (session.rank() == 0) std::printf("output of step %d\n", static_cast<int>(step));
    std::fflush(stdout);
    ProgressReport report;
    report.step = step;
    report.steps = 60;
    report.loss = 1.0 / static_cast<double>(step);
    progress.report(report);
  }
  session.shutdown();
}

class StuckJobs : public ::testing::Test {
 protected:
  std::unique_ptr<Process> launch(int workers, const std::string& scenario, const std::string& output,
                                  std::vector<std::string> options = {}) const {
    const auto self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> command = {(self.parent_path() / "torchspan").string(), "run", "-n",
                                        std::to_string(workers)};
    for (std::string& option : options) command.push_back(std::move(option));
    command.push_back(self.string());
    const std::map<std::string, std::string> variables{{"TORCHSPAN_TEST_SCENARIO", scenario},
                                                       {"TMPDIR", folder_.path()},
                                                       {"XDG_RUNTIME_DIR", ""},
                                                       {"TERM", "xterm"},
                                                       {"NO_COLOR", "1"},
                                                       {"OMP_NUM_THREADS", "1"}};
    return std::make_unique<Process>(command, variables, output);
  }
  /// Runs a job that times out; returns the launcher's output.
  std::string run(int workers, const std::string& scenario) {
    const auto job =
        launch(workers, scenario, folder_.path() + "/output", {"--log-dir", folder_.path() + "/logs"});
    EXPECT_TRUE(job->wait(*executor_, seconds(60))) << job->output();
    EXPECT_NE(job->exit_code(), 0);
    return job->output();
  }
  /// The pages in the folder of logs.
  std::vector<std::string> pages() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path() + "/logs")) {
      if (!entry.path().filename().string().starts_with("torchspan-stacks-")) continue;
      std::ifstream file(entry.path());
      all.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return all;
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  const TemporaryFolder folder_;
};

TEST_F(StuckJobs, NameTheRankThatIsMissingInACollective) {
  const std::string output = run(3, "stuck.missing_rank");
  const std::string suspect = "rank 1 is not in it: it has been in 'augment'";
  EXPECT_THAT(output, AllOf(HasSubstr("timed out after "), HasSubstr("probable cause:"),
                            HasSubstr("first suspect:"), HasSubstr(suspect)));
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u) << "one page for one incident, which two ranks report: " << output;
  EXPECT_THAT(all[0],
              AllOf(HasSubstr("all_reduce(Float [4], sum)"), HasSubstr(suspect), HasSubstr("rank 0  worker0"),
                    HasSubstr("rank 1  worker1"), HasSubstr("rank 2  worker2")));
}

TEST_F(StuckJobs, NameWhatAllRanksDoFromWhichAMessageMayCome) {
  const std::string output = run(3, "stuck.missing_message");
  EXPECT_THAT(
      output,
      AllOf(HasSubstr("'recv(Float [3] from any rank, tag 4)' number 0 timed out after"),
            HasSubstr("it waited for none of worker1"),
            HasSubstr("first suspect: rank 0 has waited in 'recv(Float [3] from any rank, tag 4)'"),
            HasSubstr("rank 1: it has been in 'augment'"), HasSubstr("rank 2: it has been in 'evaluate'")));
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_THAT(all[0], HasSubstr("message"));
}

TEST_F(StuckJobs, NameCallsThatWaitForEachOther) {
  const std::string output = run(2, "stuck.mutual_calls");
  EXPECT_THAT(
      output,
      AllOf(
          HasSubstr("first suspect: calls wait for each other: rank 0 has waited for 'call_back' on worker1"),
          HasSubstr("rank 1 has waited for 'never' on worker0"),
          HasSubstr("raise WorkerOptions::max_threads")));
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_THAT(all[0], HasSubstr("rank 1: the call 'never' to worker0 at stuck_test.cpp:"));
}

TEST_F(StuckJobs, NameAStoppedProcess) {
  const std::string output = run(3, "stuck.stopped_process");
  EXPECT_THAT(output,
              AllOf(HasSubstr("the call 'leaf' to worker1"), HasSubstr("first suspect: rank 1 (worker1, pid"),
                    HasSubstr("is stopped by a signal; to continue it: kill -CONT")));
}

TEST_F(StuckJobs, ShowTheStragglerOnATerminal) {
  int master = -1, slave = -1;
  std::array<char, 64> name{};
  winsize size{40, 100, 0, 0};
  ASSERT_EQ(openpty(&master, &slave, name.data(), nullptr, &size), 0);
  fcntl(master, F_SETFL, O_NONBLOCK);
  launch::TerminalScreen screen(100, 40, true);
  const auto job = launch(2, "stuck.slow_rank", name.data());
  std::string straggler, waiter;
  const Deadline limit = executor_->deadline_in(seconds(60));
  for (bool ended = false; !ended && !limit.passed(executor_->now());) {
    ended = job->wait(*executor_, milliseconds(20));
    std::array<char, 65536> bytes;
    for (ssize_t got; (got = read(master, bytes.data(), bytes.size())) > 0;)
      screen.write({bytes.data(), static_cast<std::size_t>(got)});
    for (const std::string& line : screen.lines()) {
      if (line.starts_with("* rank 1")) straggler = line;
      if (line.find("rank 0   waits for rank 1 in 'barrier'") != std::string::npos) waiter = line;
    }
  }
  EXPECT_EQ(job->exit_code(), 0);
  EXPECT_THAT(straggler, HasSubstr("others wait for it"));
  EXPECT_NE(waiter, "");
  // After the end, the screen holds all output and the last state, and nothing of the block.
  const auto lines = screen.lines();
  ASSERT_GE(lines.size(), 61u);
  const std::size_t first = lines.size() - 61;
  for (std::size_t step = 1; step <= 60; ++step)
    EXPECT_EQ(lines[first + step - 1], "[worker0] output of step " + std::to_string(step));
  EXPECT_THAT(lines.back(), AllOf(HasSubstr("torchspan: step 60/60"), HasSubstr("done 0,1")));
  close(master);
  close(slave);
}

const testing::Scenarios kScenarios("stuck", {{"missing_rank", missing_rank},
                                              {"missing_message", missing_message},
                                              {"mutual_calls", mutual_calls},
                                              {"stopped_process", stopped_process},
                                              {"slow_rank", slow_rank}});

}  // namespace
}  // namespace torchspan::stuck_test
