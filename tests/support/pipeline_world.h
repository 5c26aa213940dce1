#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/pipeline.h>

#include "tests/support/cluster.h"

namespace torchspan::testing {

/// Options of a simulated cluster whose workers can create pipelines.
inline ClusterOptions pipeline_cluster(int workers, std::uint64_t seed = 1) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<pipeline::PipelineExtension>());
    return extensions;
  };
  return options;
}

/// Runs `body` on each worker of a simulated cluster.
inline void on_workers(int workers, std::uint64_t seed, const std::function<void(Worker&)>& body) {
  SimCluster world(pipeline_cluster(workers, seed));
  world.run([&](Worker& worker) { body(worker); });
}

}  // namespace torchspan::testing
