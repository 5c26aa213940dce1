#pragma once
#include <memory>
#include <string>
#include <vector>

#include "launch/supervisor/job.h"
#include "launch/supervisor/worker.h"

namespace torchspan::launch {

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
