#pragma once
// Distributed autograd: Context, distributed backward passes, and drawings of the graph. Includes no torch/nn.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/engine/gradient_sink.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/wire.h>

namespace torchspan::autograd {

/// The tensors of one message that carry gradients, as recorded by the sending worker; or a loss.
struct GraphPart {
  static constexpr FixedString kWireName = "autograd.GraphPart";
  std::uint64_t message = 0;           ///< globally unique; 0: a loss on the worker that collects the graph
  std::string call;                    ///< function or operator name
  std::string site;                    ///< call site ("train.cpp:41"), if known
  bool reply = false;                  ///< true: a result; false: arguments
  std::uint32_t to = 0;                ///< rank of the receiver
  std::uint32_t tensors = 0;           ///< number of tensors that carry gradients
  std::vector<std::uint64_t> sources;  ///< local messages they were computed from
  std::uint64_t nodes = 0;             ///< nodes of this worker's graph behind them
  std::uint64_t parameters = 0;        ///< leaves among those nodes
};

struct WorkerGraph {
  static constexpr FixedString kWireName = "autograd.WorkerGraph";
  std::string worker;
  std::uint32_t rank = 0;
  bool silent = false;  ///< no answer: its part, and parts reached only through it, are missing
  std::vector<GraphPart> parts;
};

/// The graph of a context over all participating workers, by rank.
struct ContextGraph {
  std::uint64_t context = 0;
  std::vector<WorkerGraph> workers;

  /// Graphviz DOT: one cluster per worker, one edge per send to its receive, labeled with the call.
  std::string dot() const;
};

class ContextState;
class CurrentScope;
using engine::ParameterGradient;

/// How a pass determines which of the tensors sent in its context take part in it.
enum class PassMode : std::uint8_t {
  kSmart,  ///< detects unused sent tensors automatically
  kFast,   ///< skips the check: you assert that there are none. An unused one stalls the pass
};

struct BackwardOptions {
  bool retain_graph = false;  ///< keeps the graphs of all workers for another pass
  PassMode mode = PassMode::kSmart;
  /// Limit of the pass, counted from the call of backward(). After it the pass fails on all workers and names
  /// the sends that got no gradient; 0: no limit. The nodes that the calling thread runs itself are not interrupted.
  Duration timeout = std::chrono::minutes(10);
  /// kFast: a pass that is idle on all workers for this long and cannot make progress fails, and names the
  /// sends on all workers that get no gradient.
  Duration stall = std::chrono::seconds(2);
  /// Threads per worker that may run independent branches of its graph concurrently; 1 to 64. Hooks of
  /// non-leaf nodes may then run concurrently. Pays off for large branches only.
  unsigned threads = 1;
  /// Whether hooks of AccumulateGrad nodes on this worker run in the pass. False: the caller runs them after it, in
  /// LibTorch's engine, as hooks need that use `.grad` or final callbacks.
  bool run_leaf_hooks = true;
  /// Cancels the pass: it fails on all workers with Error{kCancelled}.
  std::stop_token stop = {};
  /// Called about ten times a second while the calling thread waits for other workers. If it throws, the pass fails on all
  /// workers: lets a program react to signals.
  std::function<void()> while_waiting = {};
};

/// Whether the pass that a gradient belongs to is still running here. Code that uses the gradient later
/// calls it again.
using PassRuns = std::function<bool()>;
/// Receives each gradient that is complete in a pass. It either moves the gradient out and returns a future
/// that the pass waits for, or leaves it and returns nullopt. Runs on the thread that drives the pass. When
/// the pass fails, backward() waits briefly for returned futures that are not complete.
using GradientTaker = std::function<std::optional<Future<void>>(const at::Tensor& parameter,
                                                                at::Tensor& gradient, const PassRuns& runs)>;

/// Handle to an autograd context: runs backward passes and reads gradients. Cheap to copy.
class ContextView {
 public:
  ContextView(Worker worker, std::shared_ptr<ContextState> state)
      : worker_(std::move(worker)), state_(std::move(state)) {}

  /// Globally unique id; the creator's rank is in the high 16 bits.
  std::uint64_t id() const;
  /// Differentiates `root` through every worker that the forward pass visited and returns when all are
  /// done. Gradients accumulate in the context on the worker of each parameter; `.grad` is unchanged. With
  /// PassMode::kFast every tensor sent in this context must contribute to the loss. Throws Error: kInvalid
  /// (root undefined, not scalar or without grad; another pass is running), kRemoteFailure naming worker
  /// and node, kDisconnected, kTimedOut, kCancelled.
  void backward(const at::Tensor& root, BackwardOptions options = {}) const;
  void backward(const std::vector<at::Tensor>& roots, BackwardOptions options = {}) const;
  /// Differentiates roots of any shape, each with a gradient of its shape; an undefined gradient means 1
  /// and requires a scalar root. Throws as above, and Error{kInvalid} that names the root whose gradient
  /// does not match.
  void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                BackwardOptions options = {}) const;
  /// Fetches the loss behind an RRef in this context and differentiates it; on its owner the value is used
  /// directly. Each call fetches it again, so PassMode::kFast allows one call only. Timeout and
  /// cancellation cover fetch and pass together. Throws what the creation of the value threw, and as above.
  void backward(const RRef<at::Tensor>& root, BackwardOptions options = {}) const;
  /// Gradients of this worker's parameters in this context, in the order of first accumulation.
  std::vector<ParameterGradient> gradients() const;
  /// Gradient of one local parameter; undefined if it has none.
  at::Tensor gradient(const at::Tensor& parameter) const;
  /// Replaces the gradient of a local parameter, as code does that averages gradients after a pass. Throws
  /// Error{kInvalid} while a pass runs.
  void replace_gradient(const at::Tensor& parameter, at::Tensor gradient) const;
  /// Clears this context's gradients on all participating workers and keeps the graphs. Call it before
  /// retrying a failed pass, because that leaves what it had accumulated; it waits until all workers know
  /// that the pass has failed. Throws Error: kInvalid, naming the worker, while a pass runs; kTimedOut.
  /// After either it may be called again.
  void clear_gradients(Duration timeout = std::chrono::seconds(30)) const;
  /// Offers the gradients of later passes on this worker to `taker` before they are stored. Each gradient
  /// goes to the first taker that accepts it. An exception from a taker fails the pass.
  void offer_gradients(GradientTaker taker) const;
  /// Whether a pass has begun in this context, as far as this worker took part in it.
  bool saw_backward() const;
  /// Adds a worker to the participants, which are notified when the context ends. Call it before sending a
  /// message that the worker serves with AutogradExtension::join(). Throws Error{kInvalid} if the context
  /// has ended.
  void add_worker(std::uint32_t rank) const;
  /// Collects from all participating workers how tensors were sent in this context, with the graphs of
  /// `roots`, losses on this worker. Read-only; a forward pass may continue meanwhile.
  ContextGraph graph(const std::vector<at::Tensor>& roots = {}) const;
  /// The same graph as Graphviz DOT.
  std::string explain(const std::vector<at::Tensor>& roots = {}) const;

 protected:
  friend class ContextScope;
  Worker worker_;
  std::shared_ptr<ContextState> state_;
};

/// A distributed autograd context. While it lives, calls from this thread record the tensors they send, so
/// that backward() can follow them back. Its destructor releases the state on all participating workers. One
/// per thread and worker: a second one throws Error{kInvalid}. Destroy it on the thread, or in the
/// coroutine, that created it.
class Context : public ContextView {
 public:
  explicit Context(const Worker& worker);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  /// Releases the context's state now and returns when all participating workers have released it. A
  /// running pass fails. Throws Error{kTimedOut}.
  void release(Duration timeout = std::chrono::seconds(30));

 private:
  std::unique_ptr<CurrentScope> scope_;
};

/// Enters a context on a user thread for the scope's lifetime. Handlers, coroutines and continuations of
/// futures inherit the context automatically.
class ContextScope {
 public:
  explicit ContextScope(const ContextView& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::unique_ptr<CurrentScope> scope_;
};

/// The context of `worker` that is current on this thread: inside a Context's scope, or in a handler of a
/// call made in one. Throws Error{kInvalid} if there is none.
ContextView current(const Worker& worker);
bool has_current(const Worker& worker);
/// Whether a context of any worker in this process is current on this thread.
bool has_current();

}  // namespace torchspan::autograd

namespace torchspan {
using autograd::BackwardOptions;
using autograd::Context;
using autograd::ContextScope;
using autograd::PassMode;
}  // namespace torchspan
