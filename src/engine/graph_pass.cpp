#include "engine/api/graph_pass.h"

#include <atomic>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/detail/core/mutex.h>

#include "core/api/throw_invalid.h"
#include "engine/counted_graph.h"
#include "engine/execute.h"
#include "engine/streams.h"

namespace torchspan::engine {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

class GraphPass::Impl : public std::enable_shared_from_this<Impl> {
 public:
  /// A delivery that waits for a driving thread.
  struct Queued {
    Node* root = nullptr;
    Delivery delivery;
    ArrivalMarks arrival = {};
    std::vector<Node*> roots = {};  // if `root` is null: the pending roots of a sealed pass
  };

  Impl(GradientSink& sink, PassOptions options);

  void add_local_root(Edge edge, at::Tensor gradient);
  void add_pending(NodePtr root);
  void prepare();
  bool post(Queued queued);
  bool seal();
  void run();
  bool abort(std::exception_ptr error);
  /// Ends a pass whose owner is destroyed.
  void drop();

  bool finished() const { return outcome_.load(std::memory_order_acquire) == Outcome::kFinished; }
  bool failed() const { return outcome_.load(std::memory_order_acquire) == Outcome::kFailed; }
  std::exception_ptr error() const;
  std::exception_ptr cause() const;
  std::string failed_node() const;
  NodePtr failed_at() const;
  PassReport report() const;

 private:
  enum class Outcome : std::uint8_t { kOpen, kFinished, kFailed };

  /// What a thread does that finds nothing to run.
  enum class Leave : std::uint8_t { kStay, kLeft, kEnded };

  void expect_unprepared() const;
  bool begin_driving();
  Leave leave();
  void drive();
  bool run_nodes();
  void request_helper();
  void help();
  void start();
  void process_queue();
  void process(Queued& queued);
  void fail(Node& node);
  void close();

  GradientSink& sink_;
  const bool retain_graph_;
  PassStreams streams_;
  const bool grows_;
  const unsigned threads_;
  const std::function<void(UniqueFunction<void()>)> enlist_;
  const std::function<void()> failed_;
  at::ThreadLocalState thread_state_;
  Progress progress_;
  std::unique_ptr<CountedGraph> graph_;  // used by driving threads only
  std::atomic<bool> started_{false};

  std::atomic<bool> has_queued_{false};
  std::atomic<bool> stop_{false};
  std::atomic<Outcome> outcome_{Outcome::kOpen};

  mutable Mutex mutex_;
  bool driving_ TORCHSPAN_GUARDED_BY(mutex_) = true;   // before prepare(), by the constructing thread
  unsigned drivers_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  // threads that drive the pass
  unsigned helpers_requested_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  // threads that will join them
  bool prepared_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool sealed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::vector<Node*> pending_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<NodePtr> later_ TORCHSPAN_GUARDED_BY(mutex_);  // of pending_: not in graph_ yet
  std::unordered_map<Node*, bool> arrived_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Queued> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::exception_ptr error_ TORCHSPAN_GUARDED_BY(mutex_);
  std::exception_ptr cause_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string failed_node_ TORCHSPAN_GUARDED_BY(mutex_);
  NodePtr failed_at_ TORCHSPAN_GUARDED_BY(mutex_);
};

GraphPass::Impl::Impl(GradientSink& sink, PassOptions options)
    : sink_(sink),
      retain_graph_(options.retain_graph),
      streams_(std::move(options.streams), std::move(options.events)),
      grows_(options.counts != nullptr),
      threads_(options.threads),
      enlist_(std::move(options.enlist)),
      failed_(std::move(options.failed)),
      thread_state_(options.thread_state ? *options.thread_state : at::ThreadLocalState()),
      graph_(std::make_unique<CountedGraph>(progress_, streams_, threads_ > 1, std::move(options.counts))) {
  if (threads_ == 0) throw_invalid("PassOptions::threads is 0; a pass needs at least one thread");
  if (threads_ > 1 && !enlist_) {
    throw_invalid("PassOptions::threads is more than 1, which requires PassOptions::enlist");
  }
  if (sink.end()->has_arrived()) {
    throw_invalid("this gradient sink belongs to a pass that has ended; create one for each pass");
  }
  thread_state_.set_grad_mode(false);
  if (streams_.any()) sink.end()->run_on(streams_.caller());
}

void GraphPass::Impl::expect_unprepared() const {
  MutexLock lock(mutex_);
  if (prepared_)
    throw_invalid("this pass is prepared already: add all roots first, then call prepare() once");
}

void GraphPass::Impl::add_local_root(Edge edge, at::Tensor gradient) {
  expect_unprepared();
  graph_->add_local_root(std::move(edge), std::move(gradient));
}

void GraphPass::Impl::add_pending(NodePtr root) {
  if (!grows_) expect_unprepared();
  if (!root) throw_invalid("a pending root of a pass must be a node, not null");
  {
    MutexLock lock(mutex_);
    if (closed_ || arrived_.contains(root.get())) return;
    if (sealed_) throw_invalid("a pending root was added to a sealed pass");
    arrived_.emplace(root.get(), false);
    pending_.push_back(root.get());
    if (grows_) return later_.push_back(std::move(root));
  }
  graph_->add_pending(std::move(root));
}

void GraphPass::Impl::prepare() {
  expect_unprepared();
  graph_->count();
  {
    MutexLock lock(mutex_);
    prepared_ = true;
    if (!error_) {
      driving_ = false;
      return;
    }
  }
  close();
}

bool GraphPass::Impl::post(Queued queued) {
  if (streams_.any()) queued.arrival = ArrivalMarks(queued.delivery.gradients, streams_.events());
  MutexLock lock(mutex_);
  if (closed_ || error_) return false;
  auto found = arrived_.find(queued.root);
  if (found == arrived_.end()) {
    throw_invalid("node '{}' is not a pending root of this pass", queued.root->name());
  }
  if (std::exchange(found->second, true)) return false;
  queue_.push_back(std::move(queued));
  has_queued_.store(true, std::memory_order_release);
  return true;
}

bool GraphPass::Impl::seal() {
  Queued queued;
  MutexLock lock(mutex_);
  if (!grows_ || closed_ || error_ || std::exchange(sealed_, true)) return false;
  queued.roots = pending_;  // including those that another thread is about to deliver to
  queue_.push_back(std::move(queued));
  has_queued_.store(true, std::memory_order_release);
  return true;
}

bool GraphPass::Impl::abort(std::exception_ptr error) {
  {
    MutexLock lock(mutex_);
    if (closed_ || error_) return false;
    error_ = std::move(error);
    stop_.store(true, std::memory_order_release);
    if (std::exchange(driving_, true)) return true;  // a driving thread closes the pass
  }
  close();
  return true;
}

void GraphPass::Impl::drop() {
  abort(std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "the backward pass was destroyed before all its gradients had arrived")));
  {
    MutexLock lock(mutex_);
    if (prepared_) return;
  }
  close();
}

std::exception_ptr GraphPass::Impl::error() const {
  MutexLock lock(mutex_);
  return error_;
}

std::exception_ptr GraphPass::Impl::cause() const {
  MutexLock lock(mutex_);
  return cause_;
}

std::string GraphPass::Impl::failed_node() const {
  MutexLock lock(mutex_);
  return failed_node_;
}

NodePtr GraphPass::Impl::failed_at() const {
  MutexLock lock(mutex_);
  return failed_at_;
}

PassReport GraphPass::Impl::report() const {
  PassReport report;
  report.nodes = progress_.nodes;
  report.executed = progress_.executed;
  report.skipped = progress_.skipped;
  MutexLock lock(mutex_);
  if (closed_) return report;
  report.busy = driving_ || !queue_.empty();
  for (Node* root : pending_) {
    if (!arrived_.at(root)) report.waiting_for.push_back(root);
  }
  return report;
}

bool GraphPass::Impl::begin_driving() {
  MutexLock lock(mutex_);
  if (driving_ || closed_) return false;
  driving_ = !started_ || !queue_.empty();
  if (driving_) drivers_ = 1;
  return driving_;
}

void GraphPass::Impl::run() {
  if (begin_driving()) drive();
}

void GraphPass::Impl::drive() {
  const device::StreamsScope streams(streams_.caller());
  bool ended;
  {
    const at::ThreadLocalStateGuard state(thread_state_);
    if (!started_.exchange(true)) start();
    ended = run_nodes();
  }
  if (ended) close();
}

/// Runs nodes while some are ready. True if the pass has ended; false if it waits for deliveries or continues
/// on other threads.
bool GraphPass::Impl::run_nodes() {
  for (;;) {
    if (has_queued_.load(std::memory_order_acquire)) process_queue();
    std::optional<std::uint32_t> index;
    if (!stop_.load(std::memory_order_acquire)) index = graph_->take_ready();
    if (index) {
      if (threads_ > 1) request_helper();
      try {
        graph_->execute(*index, sink_, retain_graph_);
      } catch (...) {
        graph_->failed_at(*index);
        fail(graph_->node(*index));
      }
      continue;
    }
    const Leave what = leave();
    if (what != Leave::kStay) return what == Leave::kEnded;
  }
}

/// The last driving thread clears driving_, unless the pass has ended.
GraphPass::Impl::Leave GraphPass::Impl::leave() {
  MutexLock lock(mutex_);
  if (!queue_.empty() && !error_) return Leave::kStay;
  if (--drivers_ > 0) return Leave::kLeft;
  if (error_ || graph_->is_done()) return Leave::kEnded;
  driving_ = false;
  return Leave::kLeft;
}

void GraphPass::Impl::request_helper() {
  if (!graph_->has_ready()) return;
  {
    MutexLock lock(mutex_);
    if (error_ || drivers_ + helpers_requested_ >= threads_) return;
    ++helpers_requested_;
  }
  enlist_([self = shared_from_this()] { self->help(); });
}

/// A thread that starts too late finds no driving thread and returns.
void GraphPass::Impl::help() {
  {
    MutexLock lock(mutex_);
    --helpers_requested_;
    if (drivers_ == 0 || error_ || closed_) return;
    ++drivers_;
  }
  drive();
}

void GraphPass::Impl::start() {
  const auto* filter = torch::autograd::get_current_graph_task_exec_info();
  if (filter && !filter->empty()) {
    abort(std::make_exception_ptr(Error(
        ErrorKind::kUnsupported,
        "a backward pass was started inside a node of LibTorch's engine that computes only some gradients "
        "(grad, or backward with inputs), which would ignore edges of this pass; call backward without "
        "inputs")));
    return;
  }
  try {
    graph_->start();
  } catch (...) {
    abort(std::make_exception_ptr(name_failure("root", std::current_exception())));
  }
}

void GraphPass::Impl::process_queue() {
  std::vector<Queued> taken;
  {
    MutexLock lock(mutex_);
    taken.swap(queue_);
    has_queued_.store(false, std::memory_order_release);
  }
  for (Queued& queued : taken) {
    try {
      process(queued);
    } catch (...) {
      if (queued.root == nullptr) {
        abort(std::current_exception());
      } else {
        fail(*queued.root);
      }
      return;
    }
  }
}

void GraphPass::Impl::process(Queued& queued) {
  if (queued.root == nullptr) return graph_->seal(queued.roots);
  queued.arrival.join(queued.delivery.gradients);
  graph_->open(*queued.root, std::move(queued.delivery));
}

void GraphPass::Impl::fail(Node& node) {
  const std::exception_ptr cause = std::current_exception();
  const std::string name = node.name();
  if (torch::autograd::AnomalyMode::is_enabled()) node.metadata()->print_stack(name);
  bool others = false;
  {
    MutexLock lock(mutex_);
    stop_.store(true, std::memory_order_release);
    if (error_) return;
    others = drivers_ > 1;
    error_ = std::make_exception_ptr(name_failure(name, cause));
    cause_ = cause;
    failed_node_ = name;
    failed_at_ = owner_of(node);
  }
  if (others && failed_) failed_();
}

/// Called once, by a driving thread.
void GraphPass::Impl::close() {
  const device::StreamsScope streams(streams_.caller());
  const std::shared_ptr<PassEnd> end = sink_.end();
  std::vector<Queued> queue;
  std::vector<NodePtr> later;
  std::unique_ptr<CountedGraph> graph;
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    graph.swap(graph_);
    queue.swap(queue_);
    later.swap(later_);
    pending_.clear();
    error = error_;
  }
  try {
    streams_.join();
  } catch (...) {  // a device that has failed, perhaps in the node whose error there is already
    if (!error) error = std::current_exception();
  }
  graph.reset();
  queue.clear();
  later.clear();
  outcome_.store(error ? Outcome::kFailed : Outcome::kFinished, std::memory_order_release);
  end->end(error);
}

GraphPass::GraphPass(GradientSink& sink, PassOptions options)
    : impl_(std::make_shared<Impl>(sink, std::move(options))) {}

GraphPass::~GraphPass() { impl_->drop(); }

void GraphPass::add_root(const at::Tensor& root, at::Tensor gradient) {
  if (!root.defined() || !root.requires_grad()) {
    throw_invalid("a root of a backward pass must require grad: this tensor has no autograd history");
  }
  if (!gradient.defined()) {
    if (root.numel() != 1) {
      throw_invalid("a root with {} elements needs a gradient; 1 is the default for one element only",
                    root.numel());
    }
    const c10::AutoGradMode grad_mode(false);
    gradient = at::ones_like(root, at::MemoryFormat::Contiguous);
  }
  impl_->add_local_root(torch::autograd::impl::gradient_edge(root), std::move(gradient));
}

void GraphPass::add_root(Edge root, at::Tensor gradient) {
  impl_->add_local_root(std::move(root), std::move(gradient));
}

void GraphPass::add_pending(NodePtr root) { impl_->add_pending(std::move(root)); }

void GraphPass::prepare() { impl_->prepare(); }

bool GraphPass::deliver(Node& root, Delivery delivery) {
  Impl::Queued queued;
  queued.root = &root;
  queued.delivery = std::move(delivery);
  return impl_->post(std::move(queued));
}

bool GraphPass::seal() { return impl_->seal(); }

void GraphPass::run() {
  const std::shared_ptr<Impl> impl = impl_;  // a callback of the pass's end may destroy this pass
  impl->run();
}

bool GraphPass::abort(const Error& error) {
  const std::shared_ptr<Impl> impl = impl_;
  return impl->abort(std::make_exception_ptr(error));
}

bool GraphPass::finished() const { return impl_->finished(); }
bool GraphPass::failed() const { return impl_->failed(); }
std::exception_ptr GraphPass::error() const { return impl_->error(); }
std::exception_ptr GraphPass::cause() const { return impl_->cause(); }
std::string GraphPass::failed_node() const { return impl_->failed_node(); }
NodePtr GraphPass::failed_at() const { return impl_->failed_at(); }
PassReport GraphPass::report() const { return impl_->report(); }

}  // namespace torchspan::engine
