#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/observation.h>
#include <torchspan/detail/core/executor.h>

#include "core/api/descriptor.h"
#include "launch/display/display.h"
#include "launch/display/lines.h"
#include "launch/supervisor/job.h"
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

/// What a Poller watches: a stream of a worker, its end, its answer to a question; or the launcher's signals.
enum class Source : std::uint64_t { kEnd, kOutput, kErrors, kProgress, kSignal, kState };

/// The number by which a Poller's event names the source and the worker's index in its WorkerSet.
constexpr std::uint64_t token_of(Source source, std::uint32_t index) {
  return (static_cast<std::uint64_t>(source) << 32) | index;
}

struct WorkerNames {
  int rank = 0;
  int incarnation = 0;      ///< how many processes of the rank the attempt had before
  std::uint32_t index = 0;  ///< in its WorkerSet
  std::string name;
  std::string prefix;      ///< of its lines on the terminal
  std::string log_folder;  ///< empty: no logs
  bool append = false;     ///< continue the logs of an earlier process
  TimePoint began{};       ///< when the process was started
};

/// A worker's process with its streams: prints its lines, writes its logs, keeps its last lines.
class Worker {
 public:
  /// Opens the logs and watches the process and its streams. Throws kInvalid if a log cannot be written.
  Worker(WorkerNames names, Child child, Display& display, Poller& poller);
  ~Worker();
  Worker(const Worker&) = delete;

  int rank() const { return names_.rank; }
  int incarnation() const { return names_.incarnation; }
  TimePoint began() const { return names_.began; }
  const std::string& name() const { return names_.name; }
  const Child& child() const { return child_; }
  bool ended() const { return ended_; }
  /// Marks the process as ended and stops watching it. It then holds descriptors only as long as its streams are open: a
  /// job may replace thousands of workers.
  void set_ended();

  void read_output();
  void read_errors();
  /// Reads lines of the progress pipe and passes them on.
  void read_progress(const LineSplitter::Take& take);
  /// Whether its output and errors have ended.
  bool silent() const;
  /// Stops reading, for streams that other processes hold open.
  void close_streams();

  /// The last lines of its standard error.
  std::vector<std::string> last_lines() const { return words_.lines(); }
  /// More of them: a long error may follow the line that names the cause.
  std::vector<std::string> recent_lines() const { return recent_.lines(); }

 private:
  Descriptor open_log(const char* kind) const;
  void read_into(Descriptor& descriptor, Descriptor& log, LineSplitter& lines,
                 const LineSplitter::Take& take);
  void write_log(Descriptor& log, std::string_view text);

  const WorkerNames names_;
  Child child_;
  Display& display_;
  Poller& poller_;
  LineSplitter output_, errors_, progress_;
  LastLines words_;
  LastLines recent_{100};
  Descriptor output_log_, errors_log_;
  bool ended_ = false;
};

class HostLink;

/// What an attempt uses of its job. Outlives it.
struct AttemptContext {
  Executor& executor;
  const JobOptions& options;
  Display& display;
  Poller& poller;
  const std::string& program;  ///< path
  int guard = -1;              ///< Guard::registrations()
  int replacements_used = 0;   ///< by earlier attempts
  HostLink* link = nullptr;    ///< to the launchers of the other hosts; null if there are none
};

/// All worker processes of an attempt in the order of their starts, replaced ones included: those stay zombies,
/// so that their ids name them until the attempt ends. The destructor kills them.
class WorkerSet {
 public:
  WorkerSet(const AttemptContext& context, const JobSetting& setting)
      : context_(context), setting_(setting) {}

  /// Starts the worker of `rank`; `incarnation` counts its processes from 0. Throws kInvalid if the program
  /// cannot be executed or a log cannot be written, and kOverloaded if the system cannot start a process.
  void start(int rank, int incarnation);
  const std::vector<std::unique_ptr<Worker>>& all() const { return all_; }
  /// The worker of a Poller's event.
  Worker& at(std::uint32_t index) const { return *all_.at(index); }
  /// Null if no worker has this process id.
  const Worker* find(long pid) const;
  /// Whether the output and the errors of all workers have ended.
  bool silent() const;
  /// Kills the groups of the workers that have not ended.
  void kill_running() const;
  /// Kills what the workers' processes have started, also what left their groups; with `close`, stops reading
  /// streams that even then remain open.
  void kill_leftovers(bool close) const;
  /// Kills what an ended worker's process has started.
  void kill_leftovers_of(const Worker& worker) const;

 private:
  const AttemptContext& context_;
  const JobSetting& setting_;
  std::vector<std::unique_ptr<Worker>> all_;
};

}  // namespace torchspan::launch
