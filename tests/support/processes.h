#pragma once
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "core/api/descriptor.h"
#include "tests/support/fork_server.h"

namespace torchspan::testing {

/// A folder for one test; the destructor removes it with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    path_ = (std::filesystem::temp_directory_path() / "torchspan-test-XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary folder");
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A free TCP port of the loopback interface, outside the launcher's range, that no other test gets meanwhile.
inline ReservedPort reserve_port() {
  auto port = ReservedPort::draw(10000, 19999, INADDR_LOOPBACK);
  if (!port) throw std::runtime_error("no free port");
  return std::move(*port);
}

/// The folder of the programs that were built with this one.
inline std::string folder_of_programs() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

/// `torchspan run OPTIONS PROGRAM`, or this test's own program, in which the ForkServer starts the program if main() started
/// one.
inline std::vector<std::string> launched(
    const std::vector<std::string>& options,
    const std::string& program = std::filesystem::read_symlink("/proc/self/exe").filename()) {
  std::vector<std::string> command = {folder_of_programs() + "/torchspan", "run"};
  command.insert(command.end(), options.begin(), options.end());
  for (std::string& word : ForkServer::words_of(folder_of_programs() + "/" + program))
    command.push_back(std::move(word));
  return command;
}

/// Variables of rank 0 of a world of `size`, for a program that finds an error before it waits for the other ranks.
inline std::map<std::string, std::string> first_rank_of(int size) {
  return {{"RANK", "0"},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", "0"},
          {"LOCAL_WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", "1"},
          {"OMP_NUM_THREADS", "1"}};
}

/// A child process whose output goes to a file. The destructor kills it.
class Process {
 public:
  /// A program with its arguments. `environment` changes variables of this process.
  Process(const std::vector<std::string>& command, const std::map<std::string, std::string>& environment,
          std::string output)
      : output_(std::move(output)), reap_(waitpid) {
    const std::vector<std::string> texts = texts_of(environment);
    auto pointers = [](const std::vector<std::string>& strings) {
      std::vector<char*> list;
      for (const std::string& text : strings) list.push_back(const_cast<char*>(text.c_str()));
      list.push_back(nullptr);
      return list;
    };
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    if (posix_spawn(&pid_, command[0].c_str(), &actions, nullptr, pointers(command).data(),
                    pointers(texts).data()) != 0) {
      throw std::runtime_error("could not start " + command[0]);
    }
    posix_spawn_file_actions_destroy(&actions);
  }
  /// This program, from its main().
  Process(ForkServer server, const std::map<std::string, std::string>& environment, std::string output)
      : output_(std::move(output)),
        reap_([server](pid_t pid, int* status, int options) { return server.wait(pid, status, options); }),
        pid_(server.fork(texts_of(environment), output_)) {}
  ~Process() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      reap_(pid_, &status_, 0);
    }
  }
  Process(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  /// Waits for the process to end; returns false if it did not end in time.
  bool wait(Executor& executor, Duration limit) {
    const Deadline deadline = executor.deadline_in(limit);
    while (!ended_) {
      if (reap_(pid_, &status_, WNOHANG) == pid_) {
        ended_ = true;
      } else if (deadline.passed(executor.now())) {
        return false;
      } else {
        executor.sleep(std::chrono::milliseconds(5));
      }
    }
    return true;
  }
  /// The exit code, or 128 + the signal's number.
  int exit_code() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_); }
  std::string output() const {
    std::ifstream file(output_);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  static std::vector<std::string> texts_of(const std::map<std::string, std::string>& environment) {
    std::vector<std::string> texts;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      if (!environment.contains(text.substr(0, text.find('=')))) texts.push_back(text);
    }
    for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
    return texts;
  }

  const std::string output_;
  const std::function<pid_t(pid_t, int*, int)> reap_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
};

/// A world of real processes: this test's executable, started once per rank with the variables that a
/// launcher sets and with TORCHSPAN_TEST_SCENARIO, which its main() runs instead of the tests. If main() started a
/// ForkServer, that starts them.
class ProcessWorld {
 public:
  explicit ProcessWorld(int size) : size_(size), port_(reserve_port()), executor_(make_executor()) {
    std::ofstream(folder_.path() + "/secret") << "a secret that only this test knows, long enough\n";
    std::filesystem::permissions(folder_.path() + "/secret", std::filesystem::perms::owner_read);
  }

  int port() const { return port_.number(); }
  const std::string& folder() const { return folder_.path(); }
  Executor& executor() { return *executor_; }
  std::map<std::string, std::string> environment(int rank) const {
    return {{"RANK", std::to_string(rank)},
            {"WORLD_SIZE", std::to_string(size_)},
            {"LOCAL_RANK", std::to_string(rank)},
            {"LOCAL_WORLD_SIZE", std::to_string(size_)},
            {"MASTER_ADDR", "127.0.0.1"},
            {"MASTER_PORT", std::to_string(port())},
            {"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"},
            {"TORCHSPAN_RUNTIME_DIR", folder_.path()},
            {"OMP_NUM_THREADS", "1"}};
  }
  /// Starts `scenario` as `rank`; `changes` override variables, and `through` is a program with arguments
  /// that starts it, or empty.
  Process& start(int rank, const std::string& scenario, std::map<std::string, std::string> changes = {},
                 std::vector<std::string> through = {}) {
    auto variables = environment(rank);
    variables["TORCHSPAN_TEST_SCENARIO"] = scenario;
    for (auto& [name, value] : changes) variables[name] = value;
    const std::string output = folder_.path() + "/output" + std::to_string(processes_.size());
    const auto server = ForkServer::of_this_process();
    if (server && through.empty()) {
      processes_.push_back(std::make_unique<Process>(*server, variables, output));
    } else {
      through.push_back(std::filesystem::read_symlink("/proc/self/exe"));
      processes_.push_back(std::make_unique<Process>(through, variables, output));
    }
    return *processes_.back();
  }
  void start_all(const std::string& scenario) {
    for (int rank = 0; rank < size_; ++rank) start(rank, scenario);
  }
  Process& process(std::size_t index) { return *processes_[index]; }
  std::size_t size() const { return processes_.size(); }

 private:
  const int size_;
  const ReservedPort port_;
  TemporaryFolder folder_;
  const std::unique_ptr<Executor> executor_;
  std::vector<std::unique_ptr<Process>> processes_;
};

}  // namespace torchspan::testing
