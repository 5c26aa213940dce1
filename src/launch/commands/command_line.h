#pragma once
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/display/display.h"
#include "launch/supervisor/prepare.h"

namespace torchspan::launch {

/// The `torchspan` command: runs what `arguments` (without the program's name) request and returns the exit
/// code: 2 for a wrong command line or a job that could not start, 1 if output could not be written or an unexpected error
/// of the system ended the command.
int run_command_line(Executor& executor, std::vector<std::string> arguments, const Environment& environment,
                     const DisplayOptions& display);

}  // namespace torchspan::launch
