#pragma once
#include <functional>
#include <string>
#include <vector>

#include <torchspan/core/progress.h>
#include <torchspan/detail/core/executor.h>

#include "launch/display/display.h"
#include "launch/display/lines.h"
#include "launch/supervisor/child.h"

namespace torchspan::launch {

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

}  // namespace torchspan::launch
