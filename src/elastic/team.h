#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/detail/elastic/training.h>

#include "quorum/api/generation.h"

namespace torch::nn {
class Module;
}

namespace torchspan::elastic {

class TrackedState;

/// The group of one generation: agreement on the state when it begins, and the votes of its steps.
class Team {
 public:
  /// Collective.
  Team(const Training::MakeGroup& make_group, const ElasticOptions& options, quorum::Generation generation);

  const quorum::Generation& generation() const { return generation_; }
  const collective::Group& group() const { return group_; }

  /// Copies the state of the last holder to ranks without it; this rank's are its own, or written. Collective.
  void copy_state(TrackedState& state, DataPosition& position) const;
  /// Makes buffers those of the last holder. Throws Error{kInvalid} on all ranks, naming them, if parameters or positions
  /// differ. Leaves out what is each rank's own. Collective.
  void compare(const torch::nn::Module& module, const std::vector<at::Tensor>& buffers,
               const DataPosition& position) const;

  struct Vote {
    bool failed = false;   ///< this rank's step failed; as a result: the step of any rank
    bool regroup = false;  ///< a rank waits to join
    std::int64_t step = 0;
  };
  /// Returns the votes of all ranks as one. Collective.
  Vote vote(const Vote& mine) const;

 private:
  /// Those that are not each rank's own. Collective.
  std::vector<at::Tensor> shared(const std::vector<at::Tensor>& tensors) const;
  bool holds(int rank) const;
  int donor() const;  ///< the last holder, because rank 0 has other work; its rank in the group

  const quorum::Generation generation_;
  const collective::Group group_;
};

}  // namespace torchspan::elastic
