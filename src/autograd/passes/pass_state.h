#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/outbox.h"
#include "autograd/messages/weak_worker.h"
#include "autograd/passes/pass_ending.h"
#include "autograd/passes/pass_graph.h"
#include "autograd/passes/pass_key.h"
#include "autograd/passes/pass_owner.h"
#include "autograd/smart/mark_exchange.h"
#include "autograd/smart/smart_marks.h"

namespace torchspan::autograd {

/// One worker's part of one backward pass: receives the gradients of its sends, runs the graph behind them,
/// and sends gradients back for what it received. FAST: waits for every send of the context. SMART: marks are
/// sent beside the gradients (MarkExchange); a send takes part from its first gradients or mark on, and a
/// node to which other sends lead waits for them until all marks are made. Thread-safe.
class PassState final : public PassOwner {
 public:
  PassState(const Worker& worker, std::shared_ptr<ContextState> context, PassKey key);

  std::uint64_t id() const { return key_.id; }
  std::uint32_t root() const { return maker_of(key_.id); }

  /// Counts the dependencies of the losses' graph and, in FAST mode, of all sends; `roots` is empty on all
  /// workers but the one that called backward(). Once.
  void prepare(const std::vector<at::Tensor>& roots);
  /// Takes gradients for the tensors of one message that this worker sent to `peer`.
  void receive(PropagateGradients message, std::uint32_t peer);
  /// True for the first gradients of the pass on this worker, whose answer must wait for the end of its part.
  bool claim_first_gradients() { return !had_gradients_.exchange(true); }
  /// Sends the gradients of a receive node to the worker that sent its tensors.
  void send_back(const RecvNode& node, torch::autograd::variable_list gradients);
  void drive() override;
  PartReport report() const;

  PassEnding& ending() { return ending_; }
  const PassEnding& ending() const { return ending_; }
  MarkExchange& marking() { return marking_; }
  StrayGradients& stray_gradients() { return graph_.stray_gradients(); }
  /// Whether the pass's own graph puts its gradients into `sink`.
  bool fills(const engine::GradientSink& sink) { return &sink == &graph_.sink(); }
  /// Whether walking over its whole graph takes microseconds.
  bool is_small() const { return graph_.is_small(); }

  void finish() override;
  PassWork work() const override { return {graph_.report().executed, sent_, received_}; }
  bool leave_to_context(std::shared_ptr<PassOwner>& pass) const override;

 private:
  PassGraph::Hooks hooks();
  PassParts parts();
  void deliver_to_marks(const SendNodePtr& send, const std::vector<std::uint8_t>& reached);
  std::vector<MessageInfo> waits_for(const engine::PassReport& graph) const;

  const WeakWorker worker_;
  const std::uint32_t rank_;
  const std::shared_ptr<ContextState> context_;
  const PassKey key_;
  const std::shared_ptr<Outbox> outbox_;
  PassGraph graph_;
  SmartMarks marks_;
  PassEnding ending_;
  MarkExchange marking_;
  std::atomic<bool> had_gradients_{false};
  std::atomic<std::uint64_t> sent_{0}, received_{0};
  std::atomic<int> delivering_{
      0};  ///< messages that are counted in received_ and may not have reached the graph yet
};

}  // namespace torchspan::autograd
