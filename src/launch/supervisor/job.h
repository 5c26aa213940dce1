#pragma once
#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/display/display.h"
#include "launch/supervisor/endings.h"
#include "launch/supervisor/prepare.h"

namespace torchspan::launch {

/// How a job ends when its machine is needed for something else, or its time is over.
struct PreemptionPolicy {
  int signal = SIGUSR1;                       ///< besides SIGTERM
  Duration grace = std::chrono::seconds(30);  ///< from the signal to SIGKILL
  int clean_code = 0;                         ///< the launcher's exit code if every worker then exits with 0
};

struct JobOptions {
  int workers = 1;
  int least_workers = 0;             ///< 0: as `workers`; less lets the job go on with fewer
  std::vector<std::string> command;  ///< program and arguments
  std::uint16_t master_port = 0;     ///< 0 selects a free port
  std::string name_prefix = "worker";
  std::string log_folder;   ///< if set, files in it receive every worker's output and errors, too
  std::string error_file;   ///< if set, receives the first failure of a failed job as JSON
  Environment environment;  ///< what the workers inherit
  Environment extra;        ///< overrides all other variables
  DisplayOptions display;
  RestartPolicy restarts;
  NodePlace nodes;
  PreemptionPolicy preemption;
  Duration no_progress =
      std::chrono::seconds(60);              ///< without a report of Progress, until the launcher says so
  Duration grace = std::chrono::seconds(5);  ///< from SIGTERM to SIGKILL after a failure or Ctrl-C
  /// Soft limit of open files of each worker; 0: that of this process. run_job() raises its own limit while it runs.
  std::uint64_t open_files = 0;
};

/// Runs the processes of one program until all have ended, merges their output line by line, restarts the job
/// after a failure as the options say, and returns its exit code (see exit_code()). The first failure stops
/// all workers. Throws kInvalid before any process starts if the program, the port or the log folder cannot
/// be used. Handles this thread's SIGINT, SIGTERM, SIGHUP and the preemption signal meanwhile.
int run_job(Executor& executor, JobOptions options);

}  // namespace torchspan::launch
