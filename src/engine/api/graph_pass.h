#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function_hook.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/edge_counts.h"

namespace torch::autograd {
struct Node;
}

namespace torchspan::engine {

struct PassOptions {
  /// Keeps what the nodes saved in the forward pass, so that the graph can be run again.
  bool retain_graph = false;
  /// The LibTorch state (dispatch keys, autocast, profiler, …) that nodes run under, with grad mode off;
  /// none: the state of the thread that constructs the pass.
  std::optional<at::ThreadLocalState> thread_state = std::nullopt;
  /// How many threads may run nodes of branches that do not depend on each other at once. Leaves, their hooks
  /// and the sink are served one after the other all the same.
  unsigned threads = 1;
  /// Runs a job on another thread, soon; needed for more threads than one.
  std::function<void(UniqueFunction<void()>)> enlist = {};
  /// Called when a node has failed while other threads run other nodes, which the pass's end waits for; on
  /// the thread that ran it, without locks.
  std::function<void()> failed = {};
  /// The pass goes through a part of the graph that these count, which its pending roots make known: they may
  /// be added until seal(), and no node leads to one. Its cost is that of the part. Up to seal() it does not
  /// end, and a node that other parts lead to waits for them.
  std::shared_ptr<const EdgeCounts> counts = {};
};

/// Gradients for a pending root. Output i of the root is fed by gradient i; gradients may be undefined.
struct Delivery {
  torch::autograd::variable_list gradients;
  /// Which outputs of the root the pass reaches; empty: all. What lies behind an output that is not reached
  /// counts it as settled without having got anything: a node that nothing reaches is skipped, not run.
  std::vector<bool> reached;
};

/// What a pass has done and what it still waits for: the text of a stall's diagnosis.
struct PassReport {
  std::size_t nodes = 0;
  std::size_t executed = 0;
  std::size_t skipped = 0;
  bool driven = false;  ///< a thread runs its nodes at this moment
  std::vector<torch::autograd::Node*>
      waiting_for;  ///< pending roots that got nothing yet, in the order added
  std::vector<std::string>
      unreached;  ///< names of the nodes behind them; empty while a thread drives the pass
};

/// One backward pass over this process's part of the graph; runs any torch::autograd::Node as LibTorch's
/// engine would (order, hooks, checks, sums, streams), but takes roots whose gradients arrive later, from any
/// thread, and gives the gradients of leaves to a sink: AccumulateGrad's hooks run, `.grad` stays as it is.
/// Use: add roots, prepare(), then run() after each deliver() until finished(). deliver, run, abort and the
/// queries are thread-safe; one thread drives at a time, or as many as PassOptions::threads allows; others
/// hand over to it and return. No lock is held while nodes, hooks and destructors run. The sink must live
/// until finished() or failed(), the pass until every thread's call has returned as well: keep it in a
/// shared_ptr when several deliver. create_graph is not supported: nodes run with grad mode off.
class GraphPass {
 public:
  explicit GraphPass(GradientSink& sink, PassOptions options = {});
  /// A pass that has not ended ends with Error{kCancelled}.
  ~GraphPass();
  GraphPass(const GraphPass&) = delete;
  GraphPass& operator=(const GraphPass&) = delete;

  /// A tensor of this process to differentiate, with its gradient; none means 1 for a tensor of one element.
  /// Throws Error{kInvalid} when `root` needs no gradient or `gradient` does not fit.
  void add_root(const at::Tensor& root, at::Tensor gradient = {});
  /// The same for an input of a node; an undefined gradient is passed on.
  void add_root(torch::autograd::Edge root, at::Tensor gradient);
  /// A node whose input gradients will be delivered; it waits for them and for nothing else. Nothing when it
  /// was added before. With PassOptions::counts thread-safe.
  void add_pending(std::shared_ptr<torch::autograd::Node> root);
  /// Counts the dependencies of every node that the roots reach. Once, after the last root.
  void prepare();

  /// Hands a pending root its gradients, ready on the streams current on this thread; run() does the work.
  /// False when they came already or the pass has ended. Allowed before prepare(). Throws Error{kInvalid} for
  /// a node that is no pending root of this pass.
  bool deliver(torch::autograd::Node& root, Delivery delivery);
  bool deliver(torch::autograd::Node& root, torch::autograd::variable_list gradients) {
    return deliver(root, Delivery{std::move(gradients), {}});
  }
  /// Tells that a pending root will get nothing in this pass. Results as deliver().
  bool discard(torch::autograd::Node& root);
  /// With PassOptions::counts: all pending roots were added; run() goes on with that. False when it was told
  /// before or the pass has ended.
  bool seal();

  /// Runs the nodes that are ready, highest sequence number first (equal ones in the order of discovery), and
  /// those that become ready, until none is. Returns at once when another thread, or this one further up its
  /// stack, is driving: that one goes on with what is new. With several threads it may return while others
  /// run the last nodes. Throws nothing: a failure ends the pass.
  void run();
  /// Ends the pass with `error` unless it has ended; the node that is running finishes first. False when it
  /// had ended or failed.
  bool abort(const Error& error);

  /// All work is done; the sink's end has been told.
  bool finished() const;
  bool failed() const;
  /// The first failure: an Error whose message names the node, or the one given to abort(); null without.
  std::exception_ptr error() const;
  /// The failure as it was thrown inside the node; null without, and after abort().
  std::exception_ptr cause() const;
  /// The name of the node that failed; empty without, and after abort().
  std::string failed_node() const;
  /// That node itself.
  std::shared_ptr<torch::autograd::Node> failed_at() const;
  /// Without `names` unreached stays empty: it takes a walk over the whole graph.
  PassReport report(bool names = true) const;

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::engine
