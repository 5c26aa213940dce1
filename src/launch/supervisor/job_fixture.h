#pragma once
#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <poll.h>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/captured.h"
#include "launch/supervisor/job.h"

namespace torchspan::launch {

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// For tests: jobs whose workers are shell scripts. The launcher runs in this process, or in a child of it.
class Jobs : public ::testing::Test {
 protected:
  Jobs() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~Jobs() override { std::filesystem::remove_all(folder_); }

  JobOptions options(int workers, const std::string& script) const {
    JobOptions options;
    options.workers = workers;
    options.command = {"/bin/sh", "-c", script};
    options.environment = {
        {"PATH", "/usr/bin:/bin"}, {"FOLDER", folder_}, {"TMPDIR", folder_}, {"OMP_NUM_THREADS", "1"}};
    options.display = {.output = output_.descriptor(), .errors = errors_.descriptor()};
    return options;
  }
  int run(JobOptions options) {
    const int code = run_job(*executor_, std::move(options));
    EXPECT_EQ(leftovers(), 0) << "the job's folder is still there" << contents();
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process of the launcher is left";
    return code;
  }
  int run(int workers, const std::string& script) { return run(options(workers, script)); }
  std::string output() const { return output_.text(); }
  std::string errors() const { return errors_.text(); }
  /// Waits until the launcher has written `text` to its errors.
  void wait_for_error(const std::string& text) const {
    const Deadline limit = executor_->deadline_in(std::chrono::seconds(60));
    while (errors().find(text) == std::string::npos) {
      ASSERT_FALSE(limit.passed(executor_->now())) << "no '" << text << "' in: " << errors();
      executor_->sleep(std::chrono::milliseconds(5));
    }
  }
  std::string file(const std::string& name) const {
    std::ifstream stream(folder_ + "/" + name);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::string contents() const {
    std::string all;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_))
      all += " " + entry.path().string();
    return all;
  }
  std::ptrdiff_t leftovers() const {
    const auto all = std::filesystem::directory_iterator(folder_);
    return std::count_if(begin(all), end(all), [](const auto& entry) {
      return entry.path().filename().string().starts_with("torchspan.");
    });
  }
  /// Returns what arrived through the pipe `alive_`: waits for the first bytes or, with `all_gone`, until no
  /// process holds the other end.
  std::string heard(bool all_gone) const {
    std::string all;
    std::array<char, 256> bytes;
    ssize_t got;
    while ((got = read(alive_[0], bytes.data(), bytes.size())) > 0) {
      all.append(bytes.data(), static_cast<std::size_t>(got));
      if (!all_gone) break;
    }
    return all;
  }
  /// Whether every process that holds the other end of `alive_` ends within 20 seconds.
  bool all_gone() const {
    std::array<char, 4096> bytes;
    pollfd wanted{alive_[0], POLLIN, 0};
    while (poll(&wanted, 1, 20000) == 1) {
      if (read(alive_[0], bytes.data(), bytes.size()) <= 0) return true;
    }
    return false;
  }
  /// Starts a launcher in a child process and a group, whose workers get `alive_[1]`; returns its process id.
  pid_t launch(const JobOptions& options) {
    const pid_t launcher = fork();
    if (launcher == 0) {
      setpgid(0, 0);
      close(alive_[0]);
      _exit(run_job(*make_executor(), options));
    }
    setpgid(launcher, launcher);  // parent and child both call it, so that it is done whichever runs first
    close(alive_[1]);
    return launcher;
  }
  /// Waits for `lines` lines through `alive_`.
  void wait_for_lines(std::ptrdiff_t lines) const {
    while (lines > 0) {
      const std::string more = heard(false);
      ASSERT_NE(more, "") << "the processes ended too early";
      lines -= std::count(more.begin(), more.end(), '\n');
    }
  }
  static int code_of(pid_t launcher) {
    int status = 0;
    waitpid(launcher, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string folder_;
  Captured output_, errors_;
  std::unique_ptr<Executor> executor_ = make_executor();
  std::array<int, 2> alive_ = {-1, -1};
};

}  // namespace torchspan::launch
