#pragma once
// A collective backend over any c10d process group. Includes no torch/nn.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <torchspan/collective.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::collective {

struct C10dOptions {
  /// Global rank of each group rank; empty: the ranks of the process group.
  std::vector<int> ranks = {};
  /// Rank names for errors; empty: "rank 0", ….
  std::vector<std::string> peers = {};
  /// Checks before each operation that all ranks make the same call, at the cost of one small all-gather.
  /// Without the check, c10d's backends hang or abort the process when ranks disagree.
  bool compare_calls = true;
  /// Creates the process group of a subset of ranks; called on all ranks with the members of this rank's
  /// part. If empty, split() fails with kUnsupported.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const std::vector<int>& members)> split = {};
};

/// Wraps an existing, connected c10d process group. It adds no authentication or encryption. Operations run
/// one at a time on a thread; timeouts are those of the process group. `runtime` must outlive the backend.
std::shared_ptr<Backend> make_c10d_backend(Runtime& runtime,
                                           c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                           C10dOptions options = {});

}  // namespace torchspan::collective
