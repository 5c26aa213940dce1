// One job that two launchers start on two hosts, which are network namespaces connected by a virtual cable.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <torchspan/session.h>

#include "tests/cluster/hosts_suite.h"

namespace torchspan::hosts_launch_test {
namespace {

using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::join_on_host;
using testing::Process;
using testing::require;
using testing::TemporaryFolder;

/// A worker of either host: a group of all, and a sum over it.
void sum_of_all() {
  Session session = join_on_host();
  {
    const collective::Group group = session.group({.timeout = seconds(60)});
    require(group.size() == 4, "two workers on each of two hosts");
    require(group.backend()->name() == "hierarchical", group.backend()->name());
    at::Tensor mine = at::full({300000}, session.rank());
    group.all_reduce(mine).wait();
    require((mine == 6).all().item<bool>(), "the sum of all ranks");
  }
  session.shutdown(seconds(30));
}

/// In each of the first attempts, one worker dies while the others wait for it: TEST_VICTIMS has its rank. The attempt
/// after them has to succeed.
void sum_after_deaths() {
  const std::string victims = std::getenv("TEST_VICTIMS");
  const auto attempt = static_cast<std::size_t>(std::stoi(std::getenv("TORCHSPAN_RESTART_COUNT")));
  if (attempt < victims.size()) {
    Session session = join_on_host();
    const collective::Group group = session.group({.timeout = seconds(60)});
    group.barrier();
    if (session.rank() == victims[attempt] - '0') kill(getpid(), SIGKILL);
    while (true) group.barrier();
  }
  sum_of_all();
}

/// Leaves its process id in a file, and waits until something ends it.
void wait_forever() {
  Session session = join_on_host();
  std::ofstream(std::getenv("TEST_FOLDER") + std::string("/pid") + std::to_string(session.rank()))
      << getpid() << "\n";
  while (true) session.runtime().executor.sleep(seconds(1));
}

/// A zombie has ended; its parent was a launcher that was killed.
bool is_running(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat.at(name_end + 2) != 'Z';
}

class HostsLaunch : public testing::Hosts {
 protected:
  void SetUp() override {
    Hosts::SetUp();
    net::Secret::random().write_file(folder_.path() + "/secret");
  }
  /// The launcher of one host, as its user would start it.
  std::unique_ptr<Process> launch(int node, std::vector<std::string> options,
                                  const std::string& scenario = "hosts_launch.sum_of_all") const {
    const testing::TestHost& host = node == 0 ? network_.near : network_.far;
    const auto self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> command = host.through();
    command.push_back((self.parent_path() / "torchspan").string());
    for (const char* word : {"run", "--nnodes", "2", "--node-rank", node == 0 ? "0" : "1", "-n", "2"}) {
      command.emplace_back(word);
    }
    for (std::string& option : options) command.push_back(std::move(option));
    command.push_back(self.string());
    const std::map<std::string, std::string> variables{{"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"},
                                                       {"TORCHSPAN_TEST_SCENARIO", scenario},
                                                       {"TEST_FOLDER", folder_.path()},
                                                       {"TEST_HOST", node == 0 ? "near" : "far"}};
    return std::make_unique<Process>(command, variables, folder_.path() + "/output" + std::to_string(node));
  }

  const TemporaryFolder folder_;
};

TEST_F(HostsLaunch, StartsOneJobOnBothHosts) {
  const auto executor = make_executor();
  const std::string rdzv = std::string(testing::TestNetwork::kNear) + ":29650";
  const auto far = launch(1, {"--rdzv", rdzv, "--port-range", "29660-29699"});
  const auto near = launch(0, {"--rdzv", rdzv, "--port-range", "29660-29699"});
  for (Process* host : {near.get(), far.get()}) {
    ASSERT_TRUE(host->wait(*executor, seconds(90))) << host->output();
    EXPECT_EQ(host->exit_code(), 0) << host->output();
  }
}

TEST_F(HostsLaunch, RestartsTheWorkersOfBothHostsAfterADeathOnEither) {
  const auto executor = make_executor();
  const std::string rdzv = std::string(testing::TestNetwork::kNear) + ":29652";
  std::vector<std::unique_ptr<Process>> hosts;
  for (const int node : {0, 1}) {
    hosts.push_back(launch(node,
                           {"--rdzv", rdzv, "--port-range", "29660-29699", "--max-restarts", "2",
                            "--restart-backoff", "100ms", "--env", "TEST_VICTIMS=12"},
                           "hosts_launch.sum_after_deaths"));
  }
  for (const auto& host : hosts) {
    ASSERT_TRUE(host->wait(*executor, seconds(90))) << host->output();
    EXPECT_EQ(host->exit_code(), 0) << host->output();
    for (const std::string victim : {"1", "2"})
      EXPECT_THAT(host->output(),
                  ContainsRegex("worker" + victim + " \\(rank " + victim + "[^\n]* was killed by SIGKILL"));
    EXPECT_THAT(host->output(), HasSubstr("attempt 3 succeeded"));
  }
}

TEST_F(HostsLaunch, EndsOnBothHostsWhenALauncherDies) {
  const auto executor = make_executor();
  const std::string rdzv = std::string(testing::TestNetwork::kNear) + ":29653";
  for (const std::size_t victim : {0, 1}) {
    SCOPED_TRACE(victim);
    std::vector<std::unique_ptr<Process>> hosts;
    for (const int node : {0, 1}) {
      hosts.push_back(launch(node, {"--rdzv", rdzv, "--max-restarts", "3"}, "hosts_launch.wait_forever"));
    }
    std::vector<pid_t> workers;
    const Deadline started = executor->deadline_in(seconds(60));
    for (int rank = 0; rank < 4;) {
      pid_t worker = 0;
      if (std::ifstream(folder_.path() + "/pid" + std::to_string(rank)) >> worker) {
        std::filesystem::remove(folder_.path() + "/pid" + std::to_string(rank++));
        workers.push_back(worker);
      }
      ASSERT_FALSE(started.passed(executor->now())) << hosts[0]->output() << hosts[1]->output();
      executor->sleep(std::chrono::milliseconds(10));
    }
    hosts[victim]->kill(SIGKILL);
    const TimePoint killed = executor->now();
    Process& other = *hosts[1 - victim];
    ASSERT_TRUE(other.wait(*executor, seconds(30))) << other.output();
    EXPECT_LT(executor->now() - killed, seconds(15));
    EXPECT_NE(other.exit_code(), 0);
    EXPECT_THAT(other.output(), HasSubstr("launcher" + std::to_string(victim)));
    const Deadline gone = executor->deadline_in(seconds(10));
    for (const pid_t worker : workers) {
      while (is_running(worker) && !gone.passed(executor->now()))
        executor->sleep(std::chrono::milliseconds(10));
      EXPECT_FALSE(is_running(worker)) << "process " << worker << " is left";
    }
  }
}

TEST_F(HostsLaunch, EndsWithAnErrorIfTheOtherHostNeverStarts) {
  const auto executor = make_executor();
  const auto near = launch(0, {"--rdzv", std::string(testing::TestNetwork::kNear) + ":29651", "--env",
                               "TORCHSPAN_JOIN_TIMEOUT=2"});
  ASSERT_TRUE(near->wait(*executor, seconds(60))) << near->output();
  EXPECT_NE(near->exit_code(), 0);
  EXPECT_THAT(near->output(), HasSubstr("did not join within 2 s: 1"));
}

// The launcher of the far host once gave up each connection before the transport knew why it did not open.
TEST_F(HostsLaunch, SaysThatThePathToHostZeroDropsLargePackets) {
  if (!network_.near.run("tc qdisc add dev near root tbf rate 100mbit latency 50ms burst 1200"))
    GTEST_SKIP() << "this system has no queueing discipline tbf";
  const auto executor = make_executor();
  std::vector<std::unique_ptr<Process>> hosts;
  for (const int node : {0, 1}) {
    hosts.push_back(launch(node, {"--rdzv", std::string(testing::TestNetwork::kNear) + ":29654", "--env",
                                  "TORCHSPAN_JOIN_TIMEOUT=22"}));
  }
  for (const auto& host : hosts) {
    ASSERT_TRUE(host->wait(*executor, seconds(60))) << host->output();
    EXPECT_NE(host->exit_code(), 0);
  }
  EXPECT_THAT(hosts[1]->output(), HasSubstr("passes small packets only"));
}

const testing::Scenarios kScenarios("hosts_launch", {{"sum_of_all", sum_of_all},
                                                     {"sum_after_deaths", sum_after_deaths},
                                                     {"wait_forever", wait_forever}});

}  // namespace
}  // namespace torchspan::hosts_launch_test
