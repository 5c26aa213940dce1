#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/display.h"
#include "launch/prepare.h"

namespace torchspan::launch {

struct JobOptions {
  int workers = 1;
  std::vector<std::string> command;  ///< program and arguments
  std::uint16_t master_port = 0;     ///< 0: a free one
  std::string name_prefix = "worker";
  std::string log_folder;   ///< every worker's output and errors go to files here, too
  Environment environment;  ///< what the workers inherit
  Environment extra;        ///< and what wins over everything
  DisplayOptions display;
  Duration grace = std::chrono::seconds(5);  ///< from SIGTERM to SIGKILL
};

/// Runs `workers` processes of one program to their end, with their output merged line by line, and returns
/// the job's exit code (see exit_code()). The first failure stops all. Throws kInvalid before anything starts
/// when the program, the port or the log folder cannot be. Takes over this thread's SIGINT, SIGTERM and
/// SIGHUP meanwhile.
int run_job(Executor& executor, JobOptions options);

}  // namespace torchspan::launch
