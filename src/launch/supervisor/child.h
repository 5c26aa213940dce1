#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/api/descriptor.h"
#include "launch/supervisor/prepare.h"

namespace torchspan::launch {

/// How a process ended, as the system reports it.
struct ExitStatus {
  int code = 0;
  int signal = 0;
};

/// What a worker's process gets from its launcher.
struct ChildSetting {
  int guard = -1;  ///< Guard::registrations()
  /// The soft limit of open files, if this process has raised it (RaisedOpenFiles); 0: as in this process.
  std::uint64_t open_files = 0;
};

/// A worker's process in a separate process group, with pipes from its output, its errors and its progress.
/// It is killed when the launcher (the thread that started it) dies. The destructor kills the whole group and
/// waits.
class Child {
 public:
  /// Starts `program` with empty standard input and registers its group with a Guard, if there is one. Throws
  /// kInvalid if the system cannot execute it, kOverloaded if it cannot start another process.
  Child(const std::string& program, const std::vector<std::string>& arguments, const Environment& environment,
        const ChildSetting& setting);

  pid_t pid() const { return process_.pid; }
  /// Readable once the process has ended.
  int process_descriptor() const { return watch_.get(); }
  /// Closes process_descriptor(), which is not needed once the process has ended.
  void close_process_descriptor() { watch_.reset(); }
  Descriptor& output() { return output_; }
  Descriptor& errors() { return errors_; }
  Descriptor& progress() { return progress_; }
  const Descriptor& output() const { return output_; }
  const Descriptor& errors() const { return errors_; }
  const Descriptor& progress() const { return progress_; }

  /// The exit status once the process has ended. The process stays a zombie, so that its group's number
  /// cannot be reused.
  std::optional<ExitStatus> poll_exit() const;
  /// Signals the whole group; does nothing if the group is empty.
  void signal_group(int signal) const;
  /// Signals the worker's process only, not those that it started.
  void signal_process(int signal) const;

 private:
  /// Kills the group of a started process and reaps it.
  struct Process {
    pid_t pid = -1;
    int guard = -1;
    Process() = default;
    Process(Process&& other) noexcept : pid(std::exchange(other.pid, -1)), guard(other.guard) {}
    ~Process();
  };
  Process process_;
  Descriptor watch_, output_, errors_, progress_;
};

}  // namespace torchspan::launch
