// `torchspan run --max-replacements`, across real processes: a worker of a fixed world is killed, starts again
// and joins the world, in which the others have stayed.
#include <random>

#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"

namespace torchspan::replacement_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::require;

constexpr int kKills = 4;

std::int64_t pid() { return getpid(); }
constexpr Function<pid> kPid{"pid"};

/// Calls `worker` until it answers; returns its process id.
pid_t pid_of(Worker& self, const std::string& worker) {
  const Deadline end = self.runtime().executor.deadline_in(seconds(30));
  for (;;) {
    try {
      return static_cast<pid_t>(self.rpc_sync(worker, kPid));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDisconnected || end.passed(self.runtime().executor.now())) throw;
      self.runtime().executor.sleep(milliseconds(20));
    }
  }
}

/// Kills workers 1 and 2 in a random order, and requires that each returns and that the other one has stayed.
void kill_workers(Worker& worker) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  std::printf("seed %u\n", seed);
  for (int kill = 0; kill < kKills; ++kill) {
    const int victim = 1 + static_cast<int>(random() % 2);
    const std::string names[] = {"worker" + std::to_string(victim), "worker" + std::to_string(3 - victim)};
    const pid_t killed = pid_of(worker, names[0]), other = pid_of(worker, names[1]);
    ::kill(killed, SIGKILL);
    pid_t next = killed;
    while (next == killed) next = pid_of(worker, names[0]);
    require(pid_of(worker, names[1]) == other, names[1] + " has stayed");
  }
}

/// Serves calls until worker0 calls the same barrier.
void serve(Worker& worker) {
  for (;;) {
    try {
      return worker.barrier({"worker0", worker.name()});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalid && error.kind() != ErrorKind::kDisconnected) throw;
      worker.runtime().executor.sleep(milliseconds(20));
    }
  }
}

void fixed_world() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kPid));
  Worker& worker = session.worker();
  if (session.rank() == 0) {
    kill_workers(worker);
    for (const char* name : {"worker1", "worker2"}) worker.barrier({"worker0", name});
  } else {
    serve(worker);
  }
  session.shutdown(seconds(30));
}

/// A program that does not survive the death of another worker.
void dies_with_others() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kPid));
  if (session.rank() == 1 && WorkerOptions::from_env().environment.restart_count == 0) {
    session.worker().barrier();
    ::kill(getpid(), SIGKILL);
  }
  if (WorkerOptions::from_env().environment.restart_count == 0) session.worker().barrier();
  session.shutdown(seconds(30));
}

class ReplacedWorkers : public ::testing::Test {
 protected:
  int run(const std::string& scenario, std::vector<std::string> options) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> command = {self.substr(0, self.rfind('/')) + "/torchspan", "run", "-n", "3"};
    command.insert(command.end(), options.begin(), options.end());
    command.push_back(self);
    testing::Process launcher(
        command,
        {{"TORCHSPAN_TEST_SCENARIO", scenario}, {"OMP_NUM_THREADS", "1"}, {"TMPDIR", folder_.path()}},
        folder_.path() + "/output");
    EXPECT_TRUE(launcher.wait(*executor_, seconds(120)));
    output_ = launcher.output();
    return launcher.exit_code();
  }
  testing::TemporaryFolder folder_;
  std::unique_ptr<Executor> executor_ = make_executor();
  std::string output_;
};

TEST_F(ReplacedWorkers, JoinTheRunningWorldOfTheOthers) {
  EXPECT_EQ(run("replacement.fixed_world",
                {"--max-replacements", "4", "--restart-backoff", "10ms", "--give-up-after", "0"}),
            0)
      << output_;
  EXPECT_THAT(output_, AllOf(HasSubstr("was killed by SIGKILL"), HasSubstr("(replacement 4 of 4)"),
                             Not(HasSubstr("stopping the others"))));
}

TEST_F(ReplacedWorkers, OfAProgramThatDoesNotSurviveADeathLeadToARestart) {
  EXPECT_EQ(run("replacement.dies_with_others",
                {"--max-replacements", "9", "--max-restarts", "1", "--restart-backoff", "10ms"}),
            0)
      << output_;
  EXPECT_THAT(output_,
              AllOf(HasSubstr("torchspan: attempt 1 failed: worker1 (rank 1, pid "),
                    HasSubstr("was killed by SIGKILL"), HasSubstr("torchspan: attempt 2 succeeded")));
}

const testing::Scenarios kScenarios("replacement",
                                    {{"fixed_world", fixed_world}, {"dies_with_others", dies_with_others}});

}  // namespace
}  // namespace torchspan::replacement_test
