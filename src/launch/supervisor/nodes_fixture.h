#pragma once
#include <torchspan/detail/net/secret.h>

#include "launch/supervisor/job_fixture.h"
#include "tests/support/processes.h"

namespace torchspan::launch {

/// Two launchers of one job, on loopback, with two workers each.
class NodesOnLoopback : public Jobs {
 protected:
  static constexpr int kNodes = 2;

  NodesOnLoopback() {
    net::Secret::random().write_file(folder_ + "/secret");
    EXPECT_EQ(pipe(alive_.data()), 0);
  }
  ~NodesOnLoopback() override {
    for (const pid_t launcher : launchers_) {
      if (launcher > 0) code_of_killed(launcher);
    }
    close(alive_[0]);
  }

  JobOptions node(int rank, const std::string& script, int restarts = 3) {
    JobOptions job = options(2, script);
    job.nodes = {
        .count = kNodes, .node_rank = rank, .rdzv_host = "127.0.0.1", .rdzv_port = port_, .job_id = "job"};
    job.restarts = {.most = restarts, .backoff = std::chrono::milliseconds(10), .give_up_after = 0};
    job.environment["TORCHSPAN_SECRET_FILE"] = folder_ + "/secret";
    job.environment["ALIVE"] = std::to_string(alive_[1]);
    job.display = {.output = outputs_[rank].descriptor(), .errors = messages_[rank].descriptor()};
    return job;
  }
  void start(const JobOptions& job) {
    const pid_t launcher = fork();
    if (launcher == 0) {
      close(alive_[0]);
      dup2(job.display.errors, STDERR_FILENO);  // where the launcher logs
      _exit(run_or_fail(job));
    }
    launchers_[static_cast<std::size_t>(job.nodes.node_rank)] = launcher;
  }
  void start_both(const std::string& script, int restarts = 3) {
    for (int rank = 0; rank < kNodes; ++rank) start(node(rank, script, restarts));
    close_own_end();
  }
  void close_own_end() { close(std::exchange(alive_[1], -1)); }
  /// Waits for a launcher's end and returns its exit code; -1 after a signal, -2 if it still runs after a minute.
  int code(int rank) {
    pid_t& launcher = launchers_[static_cast<std::size_t>(rank)];
    const Deadline until = executor_->deadline_in(std::chrono::seconds(60));
    for (int status = 0; !until.passed(executor_->now()); executor_->sleep(std::chrono::milliseconds(5))) {
      if (waitpid(launcher, &status, WNOHANG) != launcher) continue;
      launcher = 0;
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    return -2;
  }
  std::string errors_of(int rank) const { return messages_[rank].text(); }
  /// The lines that workers wrote into a file, sorted.
  std::vector<std::string> lines(const std::string& name) const {
    std::vector<std::string> all = lines_of(file(name));
    std::sort(all.begin(), all.end());
    return all;
  }
  void wait_for_lines_of(const std::string& name, std::size_t count) const {
    const Deadline until = executor_->deadline_in(std::chrono::seconds(60));
    while (lines(name).size() < count) {
      ASSERT_FALSE(until.passed(executor_->now())) << errors_of(0) << errors_of(1);
      executor_->sleep(std::chrono::milliseconds(5));
    }
  }

  const ReservedPort reserved_ = testing::reserve_port();
  const std::uint16_t port_ = reserved_.number();
  std::array<Captured, kNodes> outputs_, messages_;
  std::array<pid_t, kNodes> launchers_ = {};

 private:
  static int run_or_fail(const JobOptions& job) {
    try {
      return run_job(*make_executor(), job);
    } catch (const Error& error) {
      const std::string text = std::string("thrown: ") + error.what() + "\n";
      return write(job.display.errors, text.data(), text.size()) > 0 ? 2 : 3;
    }
  }
  static void code_of_killed(pid_t launcher) {
    kill(launcher, SIGKILL);
    waitpid(launcher, nullptr, 0);
  }
};

}  // namespace torchspan::launch
