// A job on two hosts that gets stuck: the launcher of either host names the rank that is the cause, on whichever host it
// runs. The hosts are network namespaces connected by a virtual cable.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <torchspan/core/observation.h>
#include <torchspan/session.h>

#include "tests/cluster/hosts_suite.h"

namespace torchspan::hosts_stuck_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::join_on_host;
using testing::Process;
using testing::TemporaryFolder;

/// Longer than any of these jobs: the launcher ends the worker before.
constexpr Duration kForever = seconds(120);
constexpr Duration kLimit = seconds(3);

void leave_process_id(Session& session) {
  const std::string path = std::getenv("TEST_FOLDER") + std::string("/pid") + std::to_string(session.rank());
  std::ofstream(path + ".new") << getpid() << "\n";
  std::filesystem::rename(path + ".new", path);
}

void barriers() {
  Session session = join_on_host();
  const collective::Group group = session.group({.timeout = seconds(60)});
  group.barrier();
  leave_process_id(session);
  while (true) group.barrier();
}

std::int64_t hold(Worker& worker, std::int64_t value) {
  const Span span(worker, "augment");
  worker.runtime().executor.sleep(kForever);
  return value;
}
constexpr Function<hold> kHold{"hold"};

/// Rank 0 calls a function on the other host that does not end.
void call_of_a_busy_rank() {
  Session session = join_on_host(FunctionTable().add(kHold));
  session.worker().barrier();
  leave_process_id(session);
  if (session.rank() == 0) session.worker().with({.timeout = kLimit}).rpc_sync(3, kHold, 1);
  session.runtime().executor.sleep(kForever);
}

class StuckOnTwoHosts : public testing::Hosts {
 protected:
  void SetUp() override {
    Hosts::SetUp();
    if (IsSkipped()) return;
    net::Secret::random().write_file(folder_.path() + "/secret");
    for (const int node : {0, 1}) std::filesystem::create_directory(temporary(node));
  }
  std::string temporary(int node) const { return folder_.path() + "/tmp" + std::to_string(node); }
  std::string torchspan() const {
    return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "torchspan").string();
  }
  /// Starts the launchers of both hosts, and waits until the workers have left their process ids.
  void launch(const std::string& scenario, const std::vector<std::string>& options, int port) {
    const std::string rdzv = std::string(testing::TestNetwork::kNear) + ":" + std::to_string(port);
    for (const int node : {0, 1}) {
      std::vector<std::string> command = (node == 0 ? network_.near : network_.far).through();
      for (const std::string& word : {torchspan(), std::string("run"), std::string("--nnodes"),
                                      std::string("2"), std::string("--node-rank"), std::to_string(node),
                                      std::string("-n"), std::string("2"), std::string("--rdzv"), rdzv}) {
        command.push_back(word);
      }
      command.insert(command.end(), options.begin(), options.end());
      command.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
      hosts_.push_back(std::make_unique<Process>(command, variables(node, scenario),
                                                 folder_.path() + "/output" + std::to_string(node)));
    }
    const Deadline started = executor_->deadline_in(seconds(90));
    const std::vector<int> ranks{0, 1, 2, 3};
    while (!std::ranges::all_of(ranks, [&](int rank) { return process_of(rank) > 0; })) {
      ASSERT_FALSE(started.passed(executor_->now())) << hosts_[0]->output() << hosts_[1]->output();
      executor_->sleep(milliseconds(10));
    }
  }
  std::map<std::string, std::string> variables(int node, const std::string& scenario = "") const {
    return {{"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"},
            {"TORCHSPAN_TEST_SCENARIO", scenario},
            {"TEST_FOLDER", folder_.path()},
            {"TEST_HOST", node == 0 ? "near" : "far"},
            {"OMP_NUM_THREADS", "1"},
            {"TORCHSPAN_STOPPED_LIMIT", "120"},  // on a busy machine, `torchspan stacks` takes seconds
            {"TMPDIR", temporary(node)},
            {"XDG_RUNTIME_DIR", temporary(node)}};
  }
  /// The process of a rank; 0 if it has not joined yet.
  int process_of(int rank) const {
    int process = 0;
    std::ifstream(folder_.path() + "/pid" + std::to_string(rank)) >> process;
    return process;
  }
  /// What `torchspan stacks` or `torchspan top` prints on a host.
  std::string shown(int node, std::vector<std::string> words) const {
    for (const auto& entry : std::filesystem::directory_iterator(temporary(node))) {
      if (entry.path().filename().string().starts_with("torchspan.")) words.push_back(entry.path().string());
    }
    std::vector<std::string> command = (node == 0 ? network_.near : network_.far).through();
    command.push_back(torchspan());
    command.insert(command.end(), words.begin(), words.end());
    Process process(command, variables(node), folder_.path() + "/shown");
    EXPECT_TRUE(process.wait(*executor_, seconds(30)));
    EXPECT_EQ(process.exit_code(), 0) << process.output();
    return process.output();
  }
  /// The same while a process is stopped.
  std::string shown_while_stopped(int process, int node, const std::vector<std::string>& words) const {
    if (process <= 0) {  // which would stop this process
      ADD_FAILURE() << "the rank has not left its process id";
      return "";
    }
    kill(process, SIGSTOP);
    const std::string text = shown(node, words);
    kill(process, SIGCONT);
    const Deadline until = executor_->deadline_in(seconds(30));
    while (shown(node, {"stacks"}).find("the job is probably not stuck") == std::string::npos) {
      if (!until.passed(executor_->now())) continue;
      ADD_FAILURE() << "the job does not go on";
      break;
    }
    return text;
  }
  std::vector<std::string> pages() const {
    std::vector<std::string> all;
    for (const int node : {0, 1}) {
      for (const auto& entry : std::filesystem::directory_iterator(temporary(node))) {
        if (!entry.path().filename().string().starts_with("torchspan-stacks-")) continue;
        std::ifstream file(entry.path());
        all.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
    return all;
  }
  void end(Process& host) const {
    EXPECT_TRUE(host.wait(*executor_, seconds(60))) << host.output();
    EXPECT_NE(host.exit_code(), 0) << host.output();
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<Executor> executor_ = make_executor();
  std::vector<std::unique_ptr<Process>> hosts_;
};

TEST_F(StuckOnTwoHosts, StacksNamesAStoppedRankOfTheOtherHostFirst) {
  for (const char* restarts : {"0", "1"}) {
    SCOPED_TRACE(restarts);
    launch("hosts_stuck.barriers", {"--max-restarts", restarts, "--port-range", "29660-29699"}, 29655);
    const int stopped = process_of(3);
    const std::string process = std::to_string(stopped);
    for (const int node : {0, 1}) {
      const std::string page = shown_while_stopped(stopped, node, {"stacks"});
      EXPECT_THAT(page,
                  ContainsRegex("\n1\\. rank 3 \\(worker3, pid " + process +
                                " on host 1 \\(.*\\)\\) is stopped by a signal; to continue it there: kill "
                                "-CONT " +
                                process + "\n"));
      for (const int rank : {0, 1, 2}) {
        EXPECT_THAT(page, ContainsRegex("\nrank " + std::to_string(rank) + "  worker" + std::to_string(rank) +
                                        "  pid " + std::to_string(process_of(rank)) + "  state . +host " +
                                        std::to_string(rank / 2)));
      }
    }
    EXPECT_THAT(shown_while_stopped(stopped, 0, {"top", "--count", "1"}),
                ContainsRegex("   3  host 1 \\(.*\\) +worker3 +" + process + " +T "));
    for (const auto& host : hosts_) host->kill(SIGINT);
    for (const auto& host : hosts_) end(*host);
    hosts_.clear();
    for (int rank = 0; rank < 4; ++rank)
      std::filesystem::remove(folder_.path() + "/pid" + std::to_string(rank));
  }
}

TEST_F(StuckOnTwoHosts, ThePageAfterATimeOutNamesTheRankOfTheOtherHost) {
  launch("hosts_stuck.call_of_a_busy_rank", {"--port-range", "29660-29699"}, 29656);
  end(*hosts_[0]);
  hosts_[1]->kill(SIGINT);
  end(*hosts_[1]);
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u) << hosts_[0]->output() << hosts_[1]->output();
  EXPECT_THAT(all[0], AllOf(HasSubstr("rank 0: the call 'hold' to worker3 at hosts_stuck_test.cpp:"),
                            ContainsRegex("\n1\\. rank 0 has waited for 'hold' on rank 3 \\(worker3, pid " +
                                          std::to_string(process_of(3)) + " on host 1 \\(.*\\)\\) at "),
                            ContainsRegex("; it has run 'hold' for worker0 for [2-9]\\."),
                            ContainsRegex("\nrank 2  worker2  pid " + std::to_string(process_of(2)))));
  EXPECT_THAT(hosts_[0]->output(), AllOf(HasSubstr("first suspect: rank 0 has waited for 'hold' on rank 3"),
                                         HasSubstr("all workers: " + temporary(0))));
}

const testing::Scenarios kScenarios("hosts_stuck",
                                    {{"barriers", barriers}, {"call_of_a_busy_rank", call_of_a_busy_rank}});

}  // namespace
}  // namespace torchspan::hosts_stuck_test
