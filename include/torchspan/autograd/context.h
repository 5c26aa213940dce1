#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/autograd/graph.h>
#include <torchspan/detail/engine/gradient_map.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

class ContextState;
class CurrentScope;
using engine::ParameterGradient;

/// How a pass finds out which of the tensors that were sent in its context take part in it.
enum class PassMode : std::uint8_t {
  kSmart,  ///< marks run ahead of the gradients: gradients are those of one process, whatever was sent
  kFast,   ///< the program promises that all take part; saves the marks. One that does not stalls the pass
};

struct BackwardOptions {
  bool retain_graph = false;  ///< keeps the graphs of all workers, so that backward may run again
  PassMode mode = PassMode::kSmart;
  /// The pass fails on all workers after this time, naming the sends that got no gradient.
  Duration timeout = std::chrono::minutes(10);
  /// FAST: a pass in which nothing has happened on any worker for this time, and nothing can, fails and names
  /// the sends of all workers that get no gradient.
  Duration stall = std::chrono::seconds(2);
  /// On every worker, how many threads may run branches of its graph that do not depend on each other at
  /// once; 1 to 64. Hooks of other nodes than leaves may then run at the same time. Pays for large branches
  /// only.
  unsigned threads = 1;
  /// Cancels the pass: it fails on all workers with Error{kCancelled}.
  std::stop_token stop = {};
};

/// Whether the pass that a gradient belongs to goes on here: what is done with the gradient later, asks
/// again.
using PassRuns = std::function<bool()>;
/// Is offered each gradient that is complete in a pass; moves it out and returns what the pass waits for, or
/// leaves it and returns nothing. Called by the thread that drives the pass. When the pass fails, its
/// backward() waits a moment for what was returned here and is not complete.
using GradientTaker = std::function<std::optional<Future<void>>(const at::Tensor& parameter,
                                                                at::Tensor& gradient, const PassRuns& runs)>;

/// A context as seen from a handler, or from the scope that made it: runs passes and reads gradients. Cheap
/// to copy.
class ContextView {
 public:
  ContextView(Worker worker, std::shared_ptr<ContextState> state)
      : worker_(std::move(worker)), state_(std::move(state)) {}

  /// Unique in the world: the maker's rank in the high 16 bits.
  std::uint64_t id() const;
  /// Differentiates `root` through every worker that the forward pass visited. Gradients accumulate in the
  /// context, on the worker where each parameter lives; `.grad` stays as it is. Returns when all workers are
  /// done. In PassMode::kFast every tensor sent in this context must take part in the loss. Throws Error:
  /// kInvalid for a root that is empty, not a scalar, or needs no gradient, and while another pass runs in
  /// this context; kRemoteFailure naming worker and node; kDisconnected for a dead worker; kTimedOut;
  /// kCancelled.
  void backward(const at::Tensor& root, BackwardOptions options = {}) const;
  void backward(const std::vector<at::Tensor>& roots, BackwardOptions options = {}) const;
  /// The same for roots of any shape, each with its gradient, of that shape; an undefined one means 1 and is
  /// for scalars. Throws as above, and Error{kInvalid} that names the root whose gradient does not fit.
  void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                BackwardOptions options = {}) const;
  /// Fetches the loss that a reference stands for, in this context, and differentiates it; on its owner it is
  /// used as it is. Each call fetches it anew, so in PassMode::kFast there may be one only. Time and
  /// cancellation go for the fetch and the pass together. Throws what the creation of the value threw, and as
  /// above.
  void backward(const RRef<at::Tensor>& root, BackwardOptions options = {}) const;
  /// The gradients that this worker's parameters have in this context, in the order of first accumulation.
  std::vector<ParameterGradient> gradients() const;
  /// The gradient of one parameter of this worker; undefined when it has none.
  at::Tensor gradient(const at::Tensor& parameter) const;
  /// Forgets the gradients that have accumulated in this context, on all workers that take part: before a
  /// pass that failed is run again, since it leaves what had accumulated. Graphs stay as they are. Throws
  /// Error: kInvalid, naming the worker, while a pass runs; kTimedOut. Either way it may be called again.
  void clear_gradients(Duration timeout = std::chrono::seconds(30)) const;
  /// Passes that begin in this context from now on offer their gradients on this worker to
  /// `taker`, before they are kept; with several takers the first that takes one has it. What a taker throws
  /// fails the pass.
  void offer_gradients(GradientTaker taker) const;
  /// Whether a pass has begun in this context, as far as this worker took part in it.
  bool saw_backward() const;
  /// Counts a worker among those of this context, which hear of its end: before a message that it serves with
  /// AutogradExtension::join(). Throws Error{kInvalid} when the context has ended.
  void add_worker(std::uint32_t rank) const;
  /// How tensors travelled in this context, asked of all workers that took part; with the graphs of `roots`,
  /// losses of this worker. For reading: a forward pass may go on meanwhile.
  ContextGraph graph(const std::vector<at::Tensor>& roots = {}) const;
  /// The same as Graphviz DOT.
  std::string explain(const std::vector<at::Tensor>& roots = {}) const;

 protected:
  friend class ContextScope;
  Worker worker_;
  std::shared_ptr<ContextState> state_;
};

/// A distributed autograd context for as long as the object lives: calls made by this thread meanwhile record
/// how tensors travelled, and backward() follows them back. Its end releases the state on all workers that
/// took part. One per thread and worker at a time: a second one throws Error{kInvalid}. Must end on the
/// thread that made it, or in the coroutine that did.
class Context : public ContextView {
 public:
  explicit Context(const Worker& worker);
  /// From whatever has a worker(): a Session.
  template <class S>
  requires requires(S& session) { session.worker(); }
  explicit Context(S& session) : Context(session.worker()) {}
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  /// Ends the context's state now and returns when every worker that took part has let go of it; a pass that
  /// runs in it fails. Throws Error{kTimedOut}.
  void release(Duration timeout = std::chrono::seconds(30));

 private:
  std::unique_ptr<CurrentScope> scope_;
};

/// Lets another thread work in a context for as long as the scope lives: for threads of the program's own.
/// Handlers, coroutines and continuations of futures have the context of where they were made by themselves.
class ContextScope {
 public:
  explicit ContextScope(const ContextView& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::unique_ptr<CurrentScope> scope_;
};

/// The context of `worker` that this thread works in: inside a Context's scope, or in a handler of a call
/// made in one. Throws Error{kInvalid} when there is none.
ContextView current(const Worker& worker);
bool has_current(const Worker& worker);
/// Whether this thread works in a context of any worker of this process.
bool has_current();

}  // namespace torchspan::autograd
