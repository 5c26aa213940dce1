#pragma once
#include <memory>
#include <vector>

#include "collective/serial/blocking_collectives.h"
#include "collective/world_link.h"

namespace torchspan::collective {

struct GlooOptions {
  Duration timeout = std::chrono::minutes(5);
  /// All ranks are in one network namespace, so the loopback interface is enough.
  bool loopback = false;
  ConnectionRounds rounds = {.tag = "torchspan.gloo"};
};

/// Whether this build has Gloo.
bool has_gloo();

/// Collective over `ranks`: connects them with LibTorch's Gloo, which finds its peers through the world's
/// membership. Null for a single rank. Throws kUnsupported in a build without Gloo's headers.
std::unique_ptr<BlockingCollectives> connect_gloo(const std::shared_ptr<WorldLink>& world,
                                                  const std::vector<int>& ranks, const GlooOptions& options);

}  // namespace torchspan::collective
