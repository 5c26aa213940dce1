#pragma once
// Cases that real processes run together, over shared memory.
#include <functional>
#include <string>
#include <vector>

#include <torchspan/session.h>

#include "tests/combinations/choices.h"

namespace torchspan::combinations {

inline constexpr int kProcesses = 4;

/// As the `check` of run_cases(), in each process. `folder` is that of the case's checkpoints.
using ProcessCheck = std::function<bool(Session& session, Choices& choices, const std::string& folder)>;

/// A scenario: runs so many cases in this process, of which run_in_processes() starts four.
void train_in_this_process(const ProcessCheck& check, long cases = 40);
void train_in_this_process(Session& session, const ProcessCheck& check, long cases);
void run_in_processes(const std::string& scenario);

/// The ranks of `session` below `ranks`, which train; all ranks call it.
struct TrainingRanks {
  TrainingRanks(Session& session, int ranks);
  bool trains;
  collective::Group group;         ///< if this rank trains, of those that do
  std::vector<std::string> names;  ///< of their workers
};

}  // namespace torchspan::combinations
