#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/autograd.h>
#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/context_lifetimes.h"
#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"

namespace torchspan::autograd {

/// The progress of a pass on all workers: as the text of an error, and as sums to compare. The workers answer
/// at different moments, so one survey may show a pause that never existed; if nothing changed between two
/// surveys, the second one is correct (Mattern's four counters, 1987).
struct StallSurvey {
  StallSurvey() = default;
  explicit StallSurvey(const std::vector<PartReport>& parts);

  /// Whether the pass has made no progress since `before` and cannot make any.
  bool is_stalled_since(const StallSurvey& before) const;
  /// The error text for a stalled FAST pass; `waiting` is appended to it.
  const char* stall_advice() const;

  bool unanswered = false;  ///< a call whose arguments wait for gradients has no result
  bool quiet = false;       ///< no worker runs nodes, no message is in flight, and some send waits
  std::uint64_t executed = 0, sent = 0;
  std::string waiting;  ///< one line for each send without a gradient
  std::string at_work;  ///< one line for each worker that runs nodes or has queued messages
};

/// Asks all workers of a context for the progress of a pass or for their part of the graph, or to clear their gradients,
/// and serves such requests. Thread-safe.
class ContextQueries : public std::enable_shared_from_this<ContextQueries> {
 public:
  ContextQueries(WeakWorker worker, std::shared_ptr<Registry> registry)
      : worker_(std::move(worker)), registry_(std::move(registry)) {}
  void serve(rpc::Registrar& registrar);

  /// The progress of a pass on all workers.
  StallSurvey survey(ContextState& context, std::uint64_t pass) const;
  /// The graphs of all workers, with those of `roots`, losses on this worker.
  ContextGraph graph(ContextState& context, const std::vector<at::Tensor>& roots) const;
  /// Clears the gradients of all workers. Throws Error{kInvalid} if a pass runs.
  void clear_gradients(ContextState& context, Duration timeout) const;

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
