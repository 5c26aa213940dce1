#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "core/api/rate_limited_warning.h"
#include "engine/api/graph_pass.h"

namespace torchspan::autograd {

/// Destination of one pass's gradients: offers them to the takers of the context, or stores them there.
class ContextSink final : public engine::GradientSink {
 public:
  ContextSink(ContextState& context, const PassKey& key)
      : GradientSink(key.id), context_(context), runs_leaf_hooks_(key.run_leaf_hooks) {}
  at::Tensor gradient(const at::Tensor& parameter) const override {
    return context_.gradients().gradient(parameter);
  }
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override;
  void replace(const at::Tensor& parameter, at::Tensor gradient) override;
  bool runs_leaf_hooks() const override { return runs_leaf_hooks_; }
  /// Completes, never with an error, when the takers have processed the gradients that they took.
  Future<void> takers_done() const;

 private:
  ContextState& context_;
  const bool runs_leaf_hooks_;
  mutable Mutex mutex_;
  std::vector<Future<void>> taken_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Finds the parameters whose gradients LibTorch's engine put into `.grad`, and not into the context, when a
/// backward function or a hook of a distributed pass ran it, as a reentrant checkpoint does. Thread-safe.
class StrayGradients {
 public:
  /// The LibTorch state of this thread, with an observer that calls note() on the pass that the thread drives
  /// when LibTorch's engine accumulates a gradient.
  static at::ThreadLocalState watched_state();
  /// The pass of LibTorch's engine that this thread runs; null if there is none.
  static const void* engine_pass();

  /// A thread of that pass of LibTorch's engine begins to drive the distributed pass; the gradients of the
  /// former are not stray.
  void begin_inside(const void* engine_pass);
  /// Called on a thread of a pass of LibTorch's engine when one of its leaves gets its gradient.
  void note(const void* engine_pass);
  /// Takes the parameters that still exist and have a gradient; temporary leaves of backward functions do
  /// not.
  std::vector<at::Tensor> parameters();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Mutex mutex_;
  std::set<const void*> outer_ TORCHSPAN_GUARDED_BY(mutex_);
  const void* noted_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::size_t left_ TORCHSPAN_GUARDED_BY(mutex_) =
      0;  // of its leaves, those that note() was not called for yet
  std::vector<WeakTensor> leaves_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Counts and logs parameters whose gradients LibTorch's engine put into `.grad` during a pass. Thread-safe.
class StrayGradientWarning {
 public:
  explicit StrayGradientWarning(Runtime& runtime)
      : metrics_(runtime.metrics), warning_(runtime.log, runtime.executor) {}
  void write(const std::vector<at::Tensor>& parameters);

 private:
  Metrics& metrics_;
  RateLimitedWarning warning_;
};

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
