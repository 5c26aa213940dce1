#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/autograd/graph.h>
#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/context_state.h"
#include "autograd/contexts/registry.h"
#include "autograd/messages/answer.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/weak_worker.h"
#include "autograd/passes/stall_survey.h"

namespace torchspan::autograd {

/// Asks all workers of a context for the progress of a pass or for their part of the graph, and answers such
/// questions. Thread-safe.
class ContextQueries : public std::enable_shared_from_this<ContextQueries> {
 public:
  ContextQueries(WeakWorker worker, std::shared_ptr<Registry> registry)
      : worker_(std::move(worker)), registry_(std::move(registry)) {}
  void serve(rpc::Registrar& registrar);

  /// The progress of a pass on all workers.
  StallSurvey survey(ContextState& context, std::uint64_t pass) const;
  /// The graphs of all workers, with those of `roots`, losses on this worker.
  ContextGraph graph(ContextState& context, const std::vector<at::Tensor>& roots) const;

 private:
  /// How long a question may take.
  static constexpr Duration kPatience = std::chrono::seconds(1);

  void ask_pass(std::uint32_t peer, AskPass message, Answer<AskPass> answer);
  void ask_graph(std::uint32_t peer, AskGraph message, Answer<AskGraph> answer);
  PartReport report_of(ContextState& context, std::uint64_t pass) const;

  const WeakWorker worker_;
  const std::shared_ptr<Registry> registry_;
};

}  // namespace torchspan::autograd
