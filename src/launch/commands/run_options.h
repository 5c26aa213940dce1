#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/supervisor/job.h"

namespace CLI {
class App;
}

namespace CLI {
class App;
}

namespace torchspan::launch {

/// The options of `torchspan run` that make its workers write and serve what they do.
struct ObservationRequest {
  std::string trace, tensorboard, scalars;  ///< folders
  std::optional<int> metrics_port;
};

void describe_observation(CLI::App& run, ObservationRequest& request);

/// Returns the variables that pass the request to the workers; folders become absolute paths.
std::map<std::string, std::string> observation_variables(const ObservationRequest& request);

/// The options of `torchspan run` as they are written.
struct RunOptions {
  std::string workers;
  std::string backoff = "1s";
  std::string longest_backoff = "1m";
  std::string grace = "30s";
  std::string preempt_signal = "USR1";
  std::vector<std::string> settings;
  NodeOptions nodes;
  ObservationRequest observation = {};
  JobOptions job;  ///< the others
};

/// Declares the options on `run`, which writes to `options` when it parses.
void describe_run_options(CLI::App& run, RunOptions& options);

/// Returns the job that the options describe, without its program. Throws kInvalid that names the wrong
/// option.
JobOptions read_run_options(const RunOptions& options, const Environment& environment);

/// Parses "500ms", "1.5s", "2m", "1h", or seconds without a unit, up to a week. Throws kInvalid, naming
/// `option`.
Duration parse_duration(const std::string& text, const std::string& option);

}  // namespace torchspan::launch
