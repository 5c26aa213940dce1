#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/display/display.h"
#include "launch/supervisor/prepare.h"

namespace torchspan::launch {

struct JobOptions {
  int workers = 1;
  std::vector<std::string> command;  ///< program and arguments
  std::uint16_t master_port = 0;     ///< 0 selects a free port
  std::string name_prefix = "worker";
  std::string log_folder;   ///< if set, files in it receive every worker's output and errors, too
  Environment environment;  ///< what the workers inherit
  Environment extra;        ///< overrides all other variables
  DisplayOptions display;
  Duration grace = std::chrono::seconds(5);  ///< time between SIGTERM and SIGKILL
};

/// Runs `workers` processes of one program until all have ended, merges their output line by line, and
/// returns the job's exit code (see exit_code()). The first failure stops all. Throws kInvalid before any
/// process starts if the program, the port or the log folder cannot be used. Handles this thread's SIGINT,
/// SIGTERM and SIGHUP meanwhile.
int run_job(Executor& executor, JobOptions options);

}  // namespace torchspan::launch
