#pragma once
#include <cstdint>

#include <torchspan/autograd/context.h>

namespace torchspan::autograd {

/// What every message of a pass carries, so that each worker can begin its part.
struct PassKey {
  std::uint64_t id = 0;
  bool retain_graph = false;
  PassMode mode = PassMode::kSmart;
  std::uint32_t threads = 1;

  static constexpr std::uint32_t kMostThreads = 64;
};

}  // namespace torchspan::autograd
