#include "launch/commands/observation_request.h"

#include <CLI/CLI.hpp>
#include <filesystem>

namespace torchspan::launch {

void describe_observation(CLI::App& run, ObservationRequest& request) {
  run.add_option("--trace", request.trace,
                 "Folder for the workers' traces; afterwards: torchspan report FOLDER -o run.html");
  run.add_option("--metrics-port", request.metrics_port,
                 "Serve Prometheus metrics at 127.0.0.1: rank r at this port + r; 0: free ports")
      ->check(CLI::Range(0, 65535));
  run.add_option("--tensorboard", request.tensorboard,
                 "Folder for event files with the scalars that the program logs");
  run.add_option("--scalars", request.scalars, "Folder for the same scalars as JSON lines");
}

std::map<std::string, std::string> observation_variables(const ObservationRequest& request) {
  std::map<std::string, std::string> variables;
  const auto folder = [&](const char* name, const std::string& path) {
    if (!path.empty()) variables[name] = std::filesystem::absolute(path).lexically_normal().string();
  };
  folder("TORCHSPAN_TRACE", request.trace);
  folder("TORCHSPAN_TENSORBOARD", request.tensorboard);
  folder("TORCHSPAN_SCALARS", request.scalars);
  if (request.metrics_port) variables["TORCHSPAN_METRICS_PORT"] = std::to_string(*request.metrics_port);
  return variables;
}

}  // namespace torchspan::launch
