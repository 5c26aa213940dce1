#pragma once
#include <memory>
#include <vector>

#include <torchspan/core/time.h>

#include "autograd/contexts/context_queries.h"
#include "autograd/contexts/context_state.h"
#include "autograd/contexts/registry.h"
#include "autograd/passes/pass_state.h"

namespace torchspan::autograd {

/// One call of backward() on the worker that makes it: begins a pass, runs this worker's part, waits for the
/// other parts, and names what the pass waits for if it does not end.
class RootPass {
 public:
  /// All arguments must outlive the object.
  RootPass(const Worker& worker, const std::shared_ptr<ContextState>& context, Registry& registry,
           const ContextQueries& queries)
      : worker_(worker), context_(context), registry_(registry), queries_(queries) {}

  /// Returns when the pass has ended on all workers; throws its failure. See ContextView::backward().
  void run(const std::vector<at::Tensor>& roots, const BackwardOptions& options);

 private:
  /// BackwardOptions::timeout, counted from the call.
  struct Limit {
    TimePoint began;
    Deadline deadline;
  };

  std::shared_ptr<PassState> begin(const BackwardOptions& options);
  void wait(PassState& pass, const BackwardOptions& options, const Limit& limit);

  const Worker& worker_;
  const std::shared_ptr<ContextState>& context_;
  Registry& registry_;
  const ContextQueries& queries_;
};

}  // namespace torchspan::autograd
