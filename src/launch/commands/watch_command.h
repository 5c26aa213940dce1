#pragma once
#include <string>

#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "launch/display/display.h"

namespace CLI {
class App;
}

namespace torchspan::launch {

/// The request of `torchspan stacks` and `torchspan top`.
struct WatchOptions {
  std::string job;
  std::string every = "1s";  ///< of top
  int count = 0;             ///< tables of top; 0: until the job or the user ends it
};

void describe_stacks_options(CLI::App& command, WatchOptions& options);
void describe_top_options(CLI::App& command, WatchOptions& options);

/// Returns which workers wait for which others in a running job. Throws Error{kInvalid} if there is no such job.
std::string show_stacks(Executor& executor, const WatchOptions& options,
                        const rendezvous::Environment& environment);

/// Shows a table of the workers again and again. Returns when the job has ended.
void show_top(Executor& executor, const WatchOptions& options, const rendezvous::Environment& environment,
              Display& out, bool terminal);

}  // namespace torchspan::launch
