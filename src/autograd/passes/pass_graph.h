#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/contexts/context_sink.h"
#include "autograd/contexts/context_state.h"
#include "autograd/passes/pass_key.h"
#include "autograd/passes/stray_gradients.h"
#include "engine/api/graph_pass.h"

namespace torchspan::autograd {

/// This worker's graph in one pass: an engine::GraphPass whose pending roots are the context's send nodes and
/// whose gradients go to the context. FAST: waits for all sends. SMART: waits for the sends that add_send()
/// names; a node that other sends lead to waits for them until seal(). Thread-safe.
class PassGraph {
 public:
  /// See engine::PassOptions.
  struct Hooks {
    std::function<void(UniqueFunction<void()>)> enlist;
    std::function<void()> failed;
  };
  PassGraph(std::shared_ptr<ContextState> context, const PassKey& key, Hooks hooks);

  ContextSink& sink() { return sink_; }
  StrayGradients& stray_gradients() { return stray_gradients_; }

  /// Adds the losses and, in FAST mode, all sends. Once, before prepare().
  void add_roots(const std::vector<at::Tensor>& roots);
  /// Counts the dependencies of what was added. Once.
  void prepare();
  /// The send of a message that went to `peer`. Throws Error{kInvalid} if there is none in this pass.
  SendNodePtr find_send(std::uint64_t message, std::uint32_t peer) const;
  /// SMART: the pass reaches this send and waits for its gradients.
  void add_send(const SendNodePtr& send) { graph_.add_pending(send); }
  /// SMART: the pass reaches no other sends. False if sealed before or ended.
  bool seal();
  bool is_sealed() const { return sealed_; }
  void deliver(SendNode& send, engine::Delivery delivery) { graph_.deliver(send, std::move(delivery)); }
  /// Runs the nodes that are ready, on this thread.
  void run();
  void abort(const Error& failure) { graph_.abort(failure); }
  /// Marks what a pass without retain_graph went through as used. SMART: the `marked` sends. Returns the sends
  /// of earlier passes that were removed for them; see ContextSends::use().
  [[nodiscard]] std::vector<SendNodePtr> use_up(const std::vector<SendNodePtr>& marked);

  /// SMART: how many sends the context had when the pass began here.
  std::size_t send_count() const { return sends_.count; }
  /// SMART: the messages of those sends.
  std::vector<MessageInfo> messages() const { return context_->sends().messages(sends_.end); }
  /// Nodes that this pass counted.
  std::size_t counted_nodes() const { return sends_.counted + report().nodes; }
  /// Whether walking over the whole graph takes microseconds.
  bool is_small() const { return nodes_ <= kSmall; }
  engine::PassReport report() const { return graph_.report(); }
  /// The error of a node that failed; see node_failure().
  Error failure(const std::string& worker, std::vector<SendNodePtr> reached) const;

 private:
  static constexpr std::size_t kSmall = 1000;

  const std::shared_ptr<ContextState> context_;
  const PassMode mode_;
  ContextSink sink_;
  StrayGradients stray_gradients_;
  engine::GraphPass graph_;
  const std::vector<SendNodePtr> fast_sends_;        // FAST: all that the pass waits for
  const PassSends sends_;                            // SMART: those that may get marks
  std::atomic<std::size_t> nodes_{~std::size_t{0}};  // unknown before prepare()
  std::atomic<bool> sealed_{false};
};

}  // namespace torchspan::autograd
