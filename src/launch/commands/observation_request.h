#pragma once
#include <map>
#include <optional>
#include <string>

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

}  // namespace torchspan::launch
