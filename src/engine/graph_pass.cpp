#include "engine/api/graph_pass.h"

#include <atomic>
#include <fmt/format.h>
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

#include "engine/counted_graph.h"
#include "engine/execute.h"
#include "engine/streams.h"

namespace torchspan::engine {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

class GraphPass::Impl : public std::enable_shared_from_this<Impl> {
 public:
  struct Mail {
    Node* root = nullptr;
    bool discarded = false;
    Delivery delivery;
    ArrivalEvents arrival;
    std::vector<Node*> roots = {};  // without a root: the graph is sealed
  };

  Impl(GradientSink& sink, PassOptions options);

  void add_local_root(Edge edge, at::Tensor gradient);
  void add_pending(std::shared_ptr<Node> root);
  void prepare();
  bool post(Mail mail);
  bool seal();
  void run();
  bool abort(std::exception_ptr error);
  /// Ends a pass that nobody will go on with.
  void drop();

  bool finished() const { return outcome_.load(std::memory_order_acquire) == Outcome::kFinished; }
  bool failed() const { return outcome_.load(std::memory_order_acquire) == Outcome::kFailed; }
  std::exception_ptr error() const;
  std::exception_ptr cause() const;
  std::string failed_node() const;
  std::shared_ptr<Node> failed_at() const;
  PassReport report(bool names) const;

 private:
  enum class Outcome : std::uint8_t { kOpen, kFinished, kFailed };

  /// What becomes of a thread that finds nothing to run.
  enum class Leave : std::uint8_t { kStay, kLeft, kEnded };

  void expect_unprepared() const;
  bool take_baton();
  Leave leave();
  void drive();
  bool run_nodes();
  void ask_for_help();
  void help();
  void start();
  void read_mail();
  void read(Mail& mail);
  void fail(Node& node);
  void close();

  GradientSink& sink_;
  const bool retain_graph_;
  const bool cuda_;
  const bool grows_;
  const unsigned threads_;
  const std::function<void(UniqueFunction<void()>)> enlist_;
  const std::function<void()> failed_;
  at::ThreadLocalState thread_state_;
  Progress progress_;
  std::unique_ptr<CountedGraph> graph_;  // touched only by the team that has the baton
  bool started_ = false;                 // likewise

  std::atomic<bool> has_mail_{false};
  std::atomic<bool> stop_{false};
  std::atomic<Outcome> outcome_{Outcome::kOpen};

  mutable Mutex mutex_;
  bool driving_ TORCHSPAN_GUARDED_BY(mutex_) = true;   // the baton; up to prepare() its constructor has it
  unsigned team_ TORCHSPAN_GUARDED_BY(mutex_) = 0;     // threads that drive together
  unsigned invited_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  // those asked to join them
  bool prepared_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool sealed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::vector<Node*> pending_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Node>> later_ TORCHSPAN_GUARDED_BY(mutex_);  // of those: unknown to graph_
  std::unordered_map<Node*, bool> arrived_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<Mail> inbox_ TORCHSPAN_GUARDED_BY(mutex_);
  std::exception_ptr error_ TORCHSPAN_GUARDED_BY(mutex_);
  std::exception_ptr cause_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string failed_node_ TORCHSPAN_GUARDED_BY(mutex_);
  std::shared_ptr<Node> failed_at_ TORCHSPAN_GUARDED_BY(mutex_);
};

GraphPass::Impl::Impl(GradientSink& sink, PassOptions options)
    : sink_(sink),
      retain_graph_(options.retain_graph),
      cuda_(has_cuda()),
      grows_(options.counts != nullptr),
      threads_(options.threads),
      enlist_(std::move(options.enlist)),
      failed_(std::move(options.failed)),
      thread_state_(options.thread_state ? *options.thread_state : at::ThreadLocalState()),
      graph_(std::make_unique<CountedGraph>(progress_, cuda_, threads_ > 1, std::move(options.counts))) {
  if (threads_ == 0) throw Error(ErrorKind::kInvalid, "PassOptions::threads is 0: a pass needs one at least");
  if (threads_ > 1 && !enlist_) {
    throw Error(ErrorKind::kInvalid, "PassOptions::threads is more than 1, which needs PassOptions::enlist");
  }
  if (sink.end()->has_come()) {
    throw Error(ErrorKind::kInvalid, "this gradient sink has seen its pass end; make one for every pass");
  }
  thread_state_.set_grad_mode(false);
}

void GraphPass::Impl::expect_unprepared() const {
  MutexLock lock(mutex_);
  if (prepared_) throw Error(ErrorKind::kInvalid, "a pass is prepared once, after its last root was added");
}

void GraphPass::Impl::add_local_root(Edge edge, at::Tensor gradient) {
  expect_unprepared();
  graph_->add_local_root(std::move(edge), std::move(gradient));
}

void GraphPass::Impl::add_pending(std::shared_ptr<Node> root) {
  if (!grows_) expect_unprepared();
  if (!root) throw Error(ErrorKind::kInvalid, "a pending root of a pass must be a node, not null");
  {
    MutexLock lock(mutex_);
    if (closed_ || arrived_.contains(root.get())) return;
    if (sealed_) throw Error(ErrorKind::kInvalid, "a pending root was added to a pass that is sealed");
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

bool GraphPass::Impl::post(Mail mail) {
  mail.arrival = ArrivalEvents(mail.delivery.gradients, cuda_);
  MutexLock lock(mutex_);
  if (closed_ || error_) return false;
  auto found = arrived_.find(mail.root);
  if (found == arrived_.end()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("node '{}' is no pending root of this pass", mail.root->name()));
  }
  if (std::exchange(found->second, true)) return false;
  inbox_.push_back(std::move(mail));
  has_mail_.store(true, std::memory_order_release);
  return true;
}

bool GraphPass::Impl::seal() {
  Mail mail;
  MutexLock lock(mutex_);
  if (!grows_ || closed_ || error_ || std::exchange(sealed_, true)) return false;
  mail.roots = pending_;  // also those whose gradients another thread is about to hand over
  inbox_.push_back(std::move(mail));
  has_mail_.store(true, std::memory_order_release);
  return true;
}

bool GraphPass::Impl::abort(std::exception_ptr error) {
  {
    MutexLock lock(mutex_);
    if (closed_ || error_) return false;
    error_ = std::move(error);
    stop_.store(true, std::memory_order_release);
    if (std::exchange(driving_, true)) return true;  // who has the baton will close the pass
  }
  close();
  return true;
}

void GraphPass::Impl::drop() {
  abort(std::make_exception_ptr(
      Error(ErrorKind::kCancelled, "the backward pass was dropped before all its gradients had arrived")));
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

std::shared_ptr<Node> GraphPass::Impl::failed_at() const {
  MutexLock lock(mutex_);
  return failed_at_;
}

PassReport GraphPass::Impl::report(bool names) const {
  PassReport report;
  report.nodes = progress_.nodes;
  report.executed = progress_.executed;
  report.skipped = progress_.skipped;
  MutexLock lock(mutex_);
  if (closed_) return report;
  report.driven = driving_;
  for (Node* root : pending_) {
    if (!arrived_.at(root)) report.waiting_for.push_back(root);
  }
  if (names && !driving_) report.unreached = graph_->unsettled();
  return report;
}

bool GraphPass::Impl::take_baton() {
  MutexLock lock(mutex_);
  if (driving_ || closed_) return false;
  driving_ = !started_ || !inbox_.empty();
  if (driving_) team_ = 1;
  return driving_;
}

void GraphPass::Impl::run() {
  if (take_baton()) drive();
}

void GraphPass::Impl::drive() {
  bool ended;
  {
    const at::ThreadLocalStateGuard state(thread_state_);
    if (!std::exchange(started_, true)) start();
    ended = run_nodes();
  }
  if (ended) close();
}

/// Runs nodes while there are any. True when the pass has ended with that; false when it waits for deliveries
/// or goes on without this thread.
bool GraphPass::Impl::run_nodes() {
  for (;;) {
    if (has_mail_.load(std::memory_order_acquire)) read_mail();
    std::optional<std::uint32_t> index;
    if (!stop_.load(std::memory_order_acquire)) index = graph_->take_ready();
    if (index) {
      if (threads_ > 1) ask_for_help();
      try {
        graph_->execute(*index, sink_, retain_graph_);
      } catch (...) {
        fail(graph_->node(*index));
      }
      continue;
    }
    const Leave what = leave();
    if (what != Leave::kStay) return what == Leave::kEnded;
  }
}

/// The last of a team puts the baton down, or keeps it for ever when the pass has ended.
GraphPass::Impl::Leave GraphPass::Impl::leave() {
  MutexLock lock(mutex_);
  if (!inbox_.empty() && !error_) return Leave::kStay;
  if (--team_ > 0) return Leave::kLeft;
  if (error_ || graph_->is_done()) return Leave::kEnded;
  driving_ = false;
  return Leave::kLeft;
}

void GraphPass::Impl::ask_for_help() {
  if (!graph_->has_ready()) return;
  {
    MutexLock lock(mutex_);
    if (error_ || team_ + invited_ >= threads_) return;
    ++invited_;
  }
  enlist_([self = shared_from_this()] { self->help(); });
}

/// Who comes too late finds no team any more.
void GraphPass::Impl::help() {
  {
    MutexLock lock(mutex_);
    --invited_;
    if (team_ == 0 || error_ || closed_) return;
    ++team_;
  }
  drive();
}

void GraphPass::Impl::start() {
  const auto* filter = torch::autograd::get_current_graph_task_exec_info();
  if (filter && !filter->empty()) {
    abort(std::make_exception_ptr(Error(
        ErrorKind::kUnsupported,
        "a backward pass was started inside a node of LibTorch's engine that computes only some gradients "
        "(grad or backward with inputs): that engine would cut this pass's edges; call backward without "
        "inputs")));
    return;
  }
  try {
    graph_->start();
  } catch (...) {
    abort(std::make_exception_ptr(name_failure("root", std::current_exception())));
  }
}

void GraphPass::Impl::read_mail() {
  std::vector<Mail> mails;
  {
    MutexLock lock(mutex_);
    mails.swap(inbox_);
    has_mail_.store(false, std::memory_order_release);
  }
  for (Mail& mail : mails) {
    try {
      read(mail);
    } catch (...) {
      if (mail.root == nullptr) {
        abort(std::current_exception());
      } else {
        fail(*mail.root);
      }
      return;
    }
  }
}

void GraphPass::Impl::read(Mail& mail) {
  if (mail.root == nullptr) return graph_->seal(mail.roots);
  mail.arrival.wait();
  if (mail.discarded) {
    graph_->discard(*mail.root);
  } else {
    graph_->open(*mail.root, std::move(mail.delivery));
  }
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
    others = team_ > 1;
    error_ = std::make_exception_ptr(name_failure(name, cause));
    cause_ = cause;
    failed_node_ = name;
    failed_at_ = node.shared_from_this();
  }
  if (others && failed_) failed_();
}

/// Called once, with the baton.
void GraphPass::Impl::close() {
  const std::shared_ptr<PassEnd> end = sink_.end();
  std::vector<Mail> inbox;
  std::vector<std::shared_ptr<Node>> later;
  std::unique_ptr<CountedGraph> graph;
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    graph.swap(graph_);
    inbox.swap(inbox_);
    later.swap(later_);
    pending_.clear();
    error = error_;
  }
  graph->join_streams();
  graph.reset();
  inbox.clear();
  later.clear();
  outcome_.store(error ? Outcome::kFailed : Outcome::kFinished, std::memory_order_release);
  end->end(error);
}

GraphPass::GraphPass(GradientSink& sink, PassOptions options)
    : impl_(std::make_shared<Impl>(sink, std::move(options))) {}

GraphPass::~GraphPass() { impl_->drop(); }

void GraphPass::add_root(const at::Tensor& root, at::Tensor gradient) {
  if (!root.defined() || !root.requires_grad()) {
    throw Error(ErrorKind::kInvalid,
                "a root of a backward pass must require gradients: this tensor has no history");
  }
  if (!gradient.defined()) {
    if (root.numel() != 1) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("a root with {} elements needs a gradient; only for one element is 1 assumed",
                              root.numel()));
    }
    const c10::AutoGradMode grad_mode(false);
    gradient = at::ones_like(root, at::MemoryFormat::Contiguous);
  }
  impl_->add_local_root(torch::autograd::impl::gradient_edge(root), std::move(gradient));
}

void GraphPass::add_root(Edge root, at::Tensor gradient) {
  impl_->add_local_root(std::move(root), std::move(gradient));
}

void GraphPass::add_pending(std::shared_ptr<Node> root) { impl_->add_pending(std::move(root)); }

void GraphPass::prepare() { impl_->prepare(); }

bool GraphPass::deliver(Node& root, Delivery delivery) {
  Impl::Mail mail;
  mail.root = &root;
  mail.delivery = std::move(delivery);
  return impl_->post(std::move(mail));
}

bool GraphPass::seal() { return impl_->seal(); }

bool GraphPass::discard(Node& root) {
  Impl::Mail mail;
  mail.root = &root;
  mail.discarded = true;
  return impl_->post(std::move(mail));
}

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
std::shared_ptr<Node> GraphPass::failed_at() const { return impl_->failed_at(); }
PassReport GraphPass::report(bool names) const { return impl_->report(names); }

}  // namespace torchspan::engine
