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
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/graph_walk.h"
#include "engine/api/node_ptr.h"

namespace torchspan::engine {

/// A node without edges, at which a pass leaves this process. Only a GraphPass runs it, through run(); apply(),
/// which LibTorch's engine calls, must throw. Its inputs stand for several tensors, each of which would have a
/// node in one process: hooks of a tensor that the pass does not reach are not called. It runs before leaves
/// and all other ready nodes; of two, the one with the higher `order` runs first.
class PassNode : public torch::autograd::Node {
 public:
  static constexpr std::uint64_t kFirstSequence = std::uint64_t{1} << 63;

  explicit PassNode(std::uint64_t order = 0) : Node(/*sequence_nr=*/kFirstSequence | order) {}
  /// `gradients` has one gradient for each input, which may be undefined; `sink` belongs to the running pass.
  virtual void run(torch::autograd::variable_list gradients, GradientSink& sink) = 0;
};

struct PassOptions {
  /// Keeps the tensors that nodes saved in the forward pass, so that the graph can be run again.
  bool retain_graph = false;
  /// The LibTorch state (dispatch keys, autocast, profiler, …) that nodes run in, with grad mode off; nullopt:
  /// the state of the thread that constructs the pass.
  std::optional<at::ThreadLocalState> thread_state = std::nullopt;
  /// How many threads may run nodes of independent branches at once. Leaves, their hooks and calls of the sink
  /// still run one after another.
  unsigned threads = 1;
  /// Runs a job on another thread soon; required if threads > 1.
  std::function<void(UniqueFunction<void()>)> enlist = {};
  /// Called when a node has failed while other threads still run nodes, for which the pass's end waits; on the
  /// thread that ran the failed node, without locks.
  std::function<void()> failed = {};
  /// The edges of a larger graph, of which the pass traverses the part behind its roots; its cost depends on
  /// that part only. Pending roots may be added until seal(); no node leads to one. Before seal(), the pass
  /// does not end, and a node that other parts lead to waits for them.
  std::shared_ptr<const EdgeCounts> counts = {};
  /// The streams that the pass begins and ends on: its first nodes wait for them, and they wait for its leaves.
  /// Every thread that runs nodes makes them current. Nullopt: the current streams of the constructing thread.
  std::optional<device::Streams> streams = std::nullopt;
  /// Where the pass takes events from; null: it creates events.
  device::EventPoolPtr events = {};
};

/// Gradients for a pending root: gradient i is for output i. Gradients may be undefined.
struct Delivery {
  torch::autograd::variable_list gradients;
  /// Which outputs of the root the pass reaches; empty: all. Nodes do not wait for outputs that are not
  /// reached; a node that no gradient reaches is skipped.
  std::vector<bool> reached;
};

/// What a pass has done and what it still waits for, to diagnose a stall.
struct PassReport {
  std::size_t nodes = 0;
  std::size_t executed = 0;
  std::size_t skipped = 0;
  bool busy = false;  ///< a thread runs its nodes, or a delivery waits for a thread to call run()
  std::vector<torch::autograd::Node*> waiting_for;  ///< pending roots without gradients, in the order added
};

/// One backward pass over this process's part of the graph. Runs any torch::autograd::Node as LibTorch's engine
/// would (order, hooks, checks, sums, streams). Gradients of pending roots may arrive later, from any thread;
/// gradients of leaves go to a sink, and `.grad` stays as it is. Add roots, prepare(), then run() after each
/// deliver() until finished(). deliver, seal, run, abort and the queries are thread-safe. The sink must live
/// until finished() or failed(). create_graph is not supported: nodes run with grad mode off. The room's
/// README describes threads and locks.
class GraphPass {
 public:
  explicit GraphPass(GradientSink& sink, PassOptions options = {});
  /// A pass that has not ended ends with Error{kCancelled}.
  ~GraphPass();
  GraphPass(const GraphPass&) = delete;
  GraphPass& operator=(const GraphPass&) = delete;

  /// Adds a tensor of this process with its gradient; an undefined gradient means 1 for a tensor of one
  /// element. Throws Error{kInvalid} if `root` does not require grad or `gradient` does not match.
  void add_root(const at::Tensor& root, at::Tensor gradient = {});
  /// The same for an input of a node; an undefined gradient stays undefined.
  void add_root(torch::autograd::Edge root, at::Tensor gradient);
  /// Adds a node whose input gradients will be delivered; it waits for these only. No effect if it was added
  /// before. Thread-safe with PassOptions::counts.
  void add_pending(NodePtr root);
  /// Counts the dependencies of every node that the roots reach. Call it once, after the last root.
  void prepare();

  /// Gives a pending root its gradients, ready on the streams current on this thread; run() does the work.
  /// False if they came before or the pass has ended. Allowed before prepare(). Throws Error{kInvalid} for a
  /// node that is not a pending root of this pass.
  bool deliver(torch::autograd::Node& root, Delivery delivery);
  bool deliver(torch::autograd::Node& root, torch::autograd::variable_list gradients) {
    return deliver(root, Delivery{std::move(gradients), {}});
  }
  /// With PassOptions::counts: declares that all pending roots were added; run() continues from there. False if
  /// sealed before or ended.
  bool seal();

  /// Runs the nodes that are ready, highest sequence number first (equal ones in the order of discovery), and
  /// those that become ready, until none is. Returns at once if another thread, or this one further up its
  /// stack, drives the pass: that one also runs what became ready. With several threads it may return while
  /// others run the last nodes. Throws nothing: a failure ends the pass.
  void run();
  /// Ends the pass with `error`; running nodes finish first. False if it had ended or failed.
  bool abort(const Error& error);

  /// Whether all work is done and the sink's end() was called.
  bool finished() const;
  bool failed() const;
  /// The first failure: an Error whose message names the node, or the one given to abort(); null if none.
  std::exception_ptr error() const;
  /// The failure as the node threw it; null if none, and after abort().
  std::exception_ptr cause() const;
  /// The name of the node that failed; empty if none, and after abort().
  std::string failed_node() const;
  /// That node itself.
  NodePtr failed_at() const;
  PassReport report() const;

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::engine
