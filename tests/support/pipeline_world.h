#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/detail/wire/frame.h>
#include <torchspan/pipeline/pipeline.h>

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

/// Nullopt for replies and for messages of the membership.
inline std::optional<wire::MessageType> request_type(const net::SimMessage& message) {
  if (!message.from.starts_with("sim:worker") || message.from.ends_with(".membership")) return std::nullopt;
  const wire::FrameView frame = wire::decode_frame(message.header);
  if ((frame.header.flags & wire::kFlagReply) != 0) return std::nullopt;
  return frame.header.type;
}

}  // namespace torchspan::testing
