#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <torchspan/collective/backend.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::collective {

struct C10dOptions {
  /// Ranks of the world by rank of the group; empty: those of the process group.
  std::vector<int> ranks = {};
  /// Names of the ranks for messages; empty: "rank 0", …
  std::vector<std::string> peers = {};
  /// Compares the ranks' calls before each operation, at the price of one small all-gather: c10d's engines
  /// hang, or end the process, where ranks disagree.
  bool compare_calls = true;
  /// Makes the process group of some ranks of this one; called on all ranks, with the members of this rank's
  /// part. Without it split() fails with kUnsupported.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const std::vector<int>& members)> split = {};
};

/// A back end over any of LibTorch's process groups, which the program made and connected. Nothing is
/// authenticated or encrypted but what that group does. Operations run one after the other on a thread;
/// time-outs are the process group's own. `runtime` must outlive it.
std::shared_ptr<Backend> make_c10d_backend(Runtime& runtime,
                                           c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                           C10dOptions options = {});

}  // namespace torchspan::collective
