#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "core/api/descriptor.h"
#include "launch/commands/watch_command.h"
#include "launch/supervisor/nodes_fixture.h"
#include "launch/watch/running_job.h"

namespace torchspan::launch::watched_nodes_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Reports a timeout as a worker does. A shell can write to descriptors below 10 only.
const std::string kNotice =
    "exec 9>/proc/self/fd/$TORCHSPAN_PROGRESS_FD; "
    R"(echo 'torchspan-timeout 1 {"kind":"collective","name":"barrier","id":9,"seconds":5}' >&9; )";

/// Two launchers of one job without restarts, on loopback, with two workers each.
class WatchedNodes : public NodesOnLoopback {
 protected:
  void start_alone(const std::string& script) { start_both(script, 0); }
  std::vector<std::string> pages() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("torchspan-stacks-")) all.push_back(file(name));
    }
    return all;
  }
  /// The folder of the running job whose launcher is this one's child.
  std::string job_folder(int node) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_ + "/node" + std::to_string(node))) {
      const std::string path = entry.path().string();
      if (entry.path().filename().string().starts_with("torchspan.") &&
          std::filesystem::exists(launcher_socket(path)))
        return path;
    }
    return "";
  }
  /// As start_both(), with a folder for temporary files for each launcher.
  void start_apart(const std::string& script, int restarts = 0) {
    for (int rank = 0; rank < kNodes; ++rank) {
      JobOptions job = node(rank, script, restarts);
      job.environment["TMPDIR"] = folder_ + "/node" + std::to_string(rank);
      std::filesystem::create_directory(job.environment["TMPDIR"]);
      start(job);
    }
    close_own_end();
    const Deadline until = executor_->deadline_in(seconds(60));
    while (job_folder(0).empty() || job_folder(1).empty()) {
      ASSERT_FALSE(until.passed(executor_->now())) << errors_of(0) << errors_of(1);
      executor_->sleep(milliseconds(5));
    }
  }
  std::string stacks(int node) const {
    WatchOptions options;
    options.job = job_folder(node);
    return show_stacks(*executor_, options, {});
  }
};

TEST_F(WatchedNodes, StartTheirWorkersWhenTheLaunchersHaveMet) {
  start_alone("echo $MASTER_PORT >> $FOLDER/stores; exit 0");
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 0) << errors_of(rank);
  const auto stores = lines("stores");
  ASSERT_EQ(stores.size(), 4u);
  EXPECT_EQ(stores, std::vector<std::string>(4, stores[0])) << "one store";
  EXPECT_NE(stores[0], std::to_string(port_)) << "there the launchers meet";
}

TEST_F(WatchedNodes, EndTheWorkersOfBothAfterTheFailureOfOne) {
  // The workers of host 0 neither end by themselves nor, if stopped, at SIGTERM.
  const std::string script = R"(
    echo $RANK >> $FOLDER/ran
    if [ $RANK = 3 ]; then
      while [ $(wc -l < $FOLDER/ran) -lt 4 ]; do sleep 0.01; done
      exit 7
    fi
    if [ $RANK = 0 ]; then kill -STOP $$; fi
    exec sleep 60)";
  for (int rank = 0; rank < kNodes; ++rank) {
    JobOptions job = node(rank, script, 0);
    job.grace = milliseconds(500);
    start(job);
  }
  close_own_end();
  const TimePoint began = executor_->now();
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 7) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), AllOf(HasSubstr("host 1"), HasSubstr("worker3 (rank 3"),
                                       HasSubstr("exited with code 7"), Not(HasSubstr("not started again"))));
  }
  EXPECT_LT(executor_->now() - began, seconds(20));
  EXPECT_TRUE(all_gone()) << "a process of a worker is left";
}

TEST_F(WatchedNodes, WriteOnePageAboutTheWorkersOfBoth) {
  // All ranks but one time out at the same time.
  ASSERT_EQ(mkfifo((folder_ + "/gate").c_str(), 0600), 0);
  const Descriptor gate(open((folder_ + "/gate").c_str(), O_RDWR | O_CLOEXEC));
  start_alone("echo $RANK >> $FOLDER/ran; read line < $FOLDER/gate; if [ $RANK != 3 ]; then " + kNotice +
              "fi; sleep 1; exit 3");
  wait_for_lines_of("ran", 4);
  ASSERT_EQ(write(gate.get(), "\n\n\n\n", 4), 4);
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 3) << errors_of(rank);
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u) << errors_of(0) << errors_of(1);
  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(all[0],
                HasSubstr("rank " + std::to_string(rank) + ": 'barrier' number 9 timed out after 5.0 s\n"));
  }
  EXPECT_THAT(all[0], AllOf(HasSubstr("\nrank 0  worker0"), HasSubstr("\nrank 3  worker3  host 1 (")));
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_THAT(errors_of(rank), HasSubstr("    all workers: " + folder_));
  }
  EXPECT_NE(errors_of(0).find(".txt on host 1 (") == std::string::npos,
            errors_of(1).find(".txt on host 0 (") == std::string::npos)
      << "the other one names its host" << errors_of(0) << errors_of(1);
}

TEST_F(WatchedNodes, WriteAPageIfTheOtherLauncherIsStopped) {
  start_both(
      "if [ $RANK = 3 ]; then echo $RANK >> $FOLDER/ran; fi; if [ $RANK = 0 ]; then while [ ! -e $FOLDER/go "
      "]; do sleep "
      "0.01; done; " +
          kNotice + "exit 3; fi; exec sleep 60",
      0);
  wait_for_lines_of("ran", 1);
  kill(launchers_[1], SIGSTOP);
  std::ofstream(folder_ + "/go") << "go";
  const TimePoint began = executor_->now();
  EXPECT_EQ(code(0), 3) << errors_of(0);
  EXPECT_LT(executor_->now() - began, seconds(20)) << "the end of the job waits for the page only";
  kill(launchers_[1], SIGCONT);
  const auto all = pages();
  ASSERT_EQ(all.size(), 1u) << errors_of(0);
  EXPECT_THAT(
      all[0],
      AllOf(HasSubstr("nothing is known of host 1 with ranks 2,3: its launcher did not answer within"),
            HasSubstr("\nrank 3  worker3  host 1\n")));
}

/// Workers that run until a file is there. Shells do not join a world; the launchers know them all the same.
const std::string kWaitForEnd = "echo $RANK >> $FOLDER/ran; while [ ! -e $FOLDER/end ]; do sleep 0.05; done";

TEST_F(WatchedNodes, AreShownByStacksOnEitherHost) {
  start_apart(kWaitForEnd);
  wait_for_lines_of("ran", 4);
  for (int node = 0; node < kNodes; ++node) {
    const std::string page = stacks(node);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_THAT(page, HasSubstr(fmt::format("\nrank {0}  worker{0}  host {1} (", rank, rank / 2)));
    }
    EXPECT_THAT(page, Not(HasSubstr("nothing is known of host")));
  }
  kill(launchers_[1], SIGKILL);
  EXPECT_EQ(code(1), -1);
  EXPECT_EQ(code(0), 1) << errors_of(0);
  EXPECT_THAT(errors_of(0), HasSubstr("launcher1"));
}

TEST_F(WatchedNodes, AreShownByStacksIfTheyAreStoppedBeforeTheyJoin) {
  start_apart("if [ $RANK = 0 -o $RANK = 3 ]; then echo $$ > $FOLDER/pid$RANK; kill -STOP $$; fi; " +
              kWaitForEnd);
  wait_for_lines_of("ran", 2);
  wait_for_lines_of("pid0", 1);
  wait_for_lines_of("pid3", 1);
  const auto wait_for_page = [&](int node, const std::string& text) {
    const Deadline until = executor_->deadline_in(seconds(30));
    std::string page = stacks(node);
    while (page.find(text) == std::string::npos && !until.passed(executor_->now())) page = stacks(node);
    EXPECT_THAT(page, HasSubstr(text));
  };
  for (int node = 0; node < kNodes; ++node) {
    for (const int rank : {0, 3}) {
      const std::string process = lines("pid" + std::to_string(rank))[0];
      wait_for_page(node, fmt::format("rank {0} (worker{0}, pid {1} on host {2} (", rank, process, rank / 2));
      wait_for_page(node,
                    fmt::format(" is stopped by a signal; to continue it there: kill -CONT {}", process));
    }
  }
  for (const char* name : {"pid0", "pid3"}) kill(std::stoi(lines(name)[0]), SIGCONT);
  std::ofstream(folder_ + "/end") << "end";
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 0) << errors_of(rank);
}

TEST_F(WatchedNodes, AreShownByStacksWithRestarts) {
  start_apart(kWaitForEnd, 1);
  wait_for_lines_of("ran", 4);
  EXPECT_THAT(stacks(1),
              AllOf(HasSubstr("\nrank 0  worker0  host 0 ("), HasSubstr("\nrank 3  worker3  host 1 (")));
  std::ofstream(folder_ + "/end") << "end";
  for (int rank = 0; rank < kNodes; ++rank) EXPECT_EQ(code(rank), 0) << errors_of(rank);
}

TEST_F(WatchedNodes, SayThatTheOwnLauncherDoesNotAnswer) {
  start_apart(kWaitForEnd);
  wait_for_lines_of("ran", 4);
  kill(launchers_[0], SIGSTOP);
  try {
    ADD_FAILURE() << stacks(0);  // shells do not join, so nothing is left to show
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("the launcher of this host does not answer"));
  }
  kill(launchers_[0], SIGCONT);
  std::ofstream(folder_ + "/end") << "end";
  // A launcher that is silent for five seconds ends the job.
  for (int rank = 0; rank < kNodes; ++rank)
    EXPECT_THAT(code(rank), ::testing::AnyOf(0, 1)) << errors_of(rank);
}

TEST_F(WatchedNodes, SayWhichHostDoesNotStart) {
  for (const int present : {0, 1}) {
    JobOptions job = node(present, "exit 0", 0);
    job.environment["TORCHSPAN_JOIN_TIMEOUT"] = "1";
    start(job);
    EXPECT_EQ(code(present), 2) << errors_of(present);
    EXPECT_THAT(errors_of(present),
                present == 0 ? HasSubstr("did not join within 1 s: 1") : HasSubstr("host 0"));
  }
}

TEST_F(WatchedNodes, BothSayThatTheirSecretsDiffer) {
  net::Secret::random().write_file(folder_ + "/other");
  JobOptions waiting = node(0, "exit 0", 0), rejected = node(1, "exit 0", 0);
  waiting.environment["TORCHSPAN_JOIN_TIMEOUT"] = "6";
  rejected.environment["TORCHSPAN_SECRET_FILE"] = folder_ + "/other";
  start(waiting);
  start(rejected);
  EXPECT_EQ(code(1), 2);
  EXPECT_THAT(errors_of(1), HasSubstr("secret differs"));
  EXPECT_EQ(code(0), 2);
  EXPECT_THAT(errors_of(0),
              AllOf(HasSubstr("the store rejected a connection from 'tcp:127.0.0.1"),
                    HasSubstr("TORCHSPAN_SECRET_FILE"), HasSubstr("did not join within 6 s: 1")));
}

TEST_F(WatchedNodes, SayThatHost0HasAnotherAddress) {
  for (const int restarts : {0, 3}) {
    JobOptions job = node(0, "exit 0", restarts);
    job.nodes.rdzv_host = "192.0.2.1";  // an address for documentation, which no host has
    start(job);
    EXPECT_EQ(code(0), 2);
    EXPECT_THAT(errors_of(0), AllOf(HasSubstr("--node-rank 0 is for the host whose address --rdzv names"),
                                    HasSubstr("192.0.2.1")));
  }
}

TEST_F(WatchedNodes, RejectDifferentOptions) {
  start(node(0, "exit 0", 0));
  start(node(1, "exit 0", 4));
  for (int rank = 0; rank < kNodes; ++rank) {
    EXPECT_EQ(code(rank), 2) << errors_of(rank);
    EXPECT_THAT(errors_of(rank), AllOf(HasSubstr("--max-restarts 0"), HasSubstr("--max-restarts 4")));
  }
}

}  // namespace
}  // namespace torchspan::launch::watched_nodes_test
