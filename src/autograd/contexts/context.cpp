#include <algorithm>
#include <cstddef>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/core/spans.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/extension_impl.h"
#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"
#include "engine/api/node_ptr.h"

namespace torchspan::autograd {
namespace {

using torch::autograd::variable_list;

/// Keeps the gradients, because the pass may be run again.
class GivenGradients final : public torch::autograd::Node {
 public:
  GivenGradients(torch::autograd::edge_list roots, variable_list gradients)
      : Node(std::move(roots)), gradients_(std::move(gradients)) {}
  variable_list apply(variable_list&&) override { return gradients_; }
  std::string name() const override { return "GivenGradients"; }

 private:
  const variable_list gradients_;
};

/// Throws Error{kInvalid} about root `index` of a backward(): "backward(): root 1 is undefined".
[[noreturn]] void refuse_root(std::size_t index, const std::string& why) {
  throw_invalid("backward(): root {} {}", index, why);
}

/// Throws if `root` is undefined or does not require grad.
void check_root(std::size_t index, const at::Tensor& root) {
  if (!root.defined()) refuse_root(index, "is undefined");
  if (!root.requires_grad())
    refuse_root(index, "does not require grad, and neither does any tensor that it was computed from");
}

at::Tensor fitted(std::size_t index, const at::Tensor& root, const at::Tensor& gradient) {
  check_root(index, root);
  if (!gradient.defined()) {
    if (root.numel() == 1) return at::ones(root.sizes(), root.options().layout(at::kStrided));
    refuse_root(index,
                fmt::format("has {} elements and an undefined gradient, which means 1 for a scalar only",
                            root.numel()));
  }
  if (gradient.sizes() != root.sizes()) {
    refuse_root(index, fmt::format("has the shape [{}], but its gradient [{}]", fmt::join(root.sizes(), ", "),
                                   fmt::join(gradient.sizes(), ", ")));
  }
  if (gradient.device() != root.device()) {
    refuse_root(index, fmt::format("is on device {}, but its gradient on {}", root.device().str(),
                                   gradient.device().str()));
  }
  if (gradient.is_complex() != root.is_complex()) {
    refuse_root(index, fmt::format("is of type {}, but its gradient of type {}",
                                   c10::toString(root.scalar_type()), c10::toString(gradient.scalar_type())));
  }
  return gradient.detach();
}

/// Reduces roots of any shape to one scalar whose backward gives each root its gradient. An undefined
/// gradient means 1 and requires a scalar root. Throws Error{kInvalid} naming the root that cannot be
/// differentiated or whose gradient does not match.
at::Tensor scalar_of(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients) {
  if (roots.empty()) throw_invalid("backward() got no root; pass it the loss");
  if (gradients.size() != roots.size()) {
    throw_invalid("backward() got {} gradients for {} roots; pass one for each root", gradients.size(),
                  roots.size());
  }
  torch::autograd::edge_list edges;
  variable_list given;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    given.push_back(fitted(i, roots[i], gradients[i]));
    edges.push_back(torch::autograd::impl::gradient_edge(roots[i]));
  }
  at::Tensor scalar = at::zeros({});
  torch::autograd::set_history(scalar, engine::make_node<GivenGradients>(std::move(edges), std::move(given)));
  return scalar;
}

void check_roots(const std::vector<at::Tensor>& roots) {
  if (roots.empty()) throw_invalid("backward() got no root; pass it the loss");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (root.defined() && root.requires_grad() && root.numel() != 1)
      refuse_root(i, fmt::format("has {} elements; a root is a scalar: reduce it first", root.numel()));
    check_root(i, root);
  }
}

/// BackwardOptions::timeout, counted from the call.
struct PassLimit {
  TimePoint began;
  Deadline deadline;
};

/// Ids grow in the order in which passes begin, so that late messages of earlier passes are recognized.
std::shared_ptr<PassState> begin_pass(const Worker& worker, const std::shared_ptr<ContextState>& context,
                                      Registry& registry, const BackwardOptions& options) {
  std::vector<SendNodePtr> gone;
  std::shared_ptr<PassState> running, pass;  // their graphs may be destroyed after the lock is released
  MutexLock beginning(context->beginning());
  running = context->pass();
  if (running) {
    throw_invalid(
        "a backward pass, begun by worker '{}', already runs in autograd context {:#x}; wait for it, or use "
        "one context for each pass",
        worker.backend()->name_of(running->root()), context->id());
  }
  pass = std::make_shared<PassState>(worker, context,
                                     PassKey{registry.next_id(), options.retain_graph, options.mode,
                                             options.threads, options.run_leaf_hooks});
  context->begin_pass(pass);
  if (options.mode == PassMode::kFast) gone = context->sends().use_up_used();
  return pass;
}

/// How often BackwardOptions::while_waiting is called.
constexpr Duration kUserTime = std::chrono::milliseconds(100);

/// Names what the pass waits for if it does not end.
void wait_for_pass(PassState& pass, const Worker& worker, ContextState& context,
                   const ContextQueries& queries, const BackwardOptions& options, const PassLimit& limit) {
  Executor& executor = worker.runtime().executor;
  const Future<void> over = pass.ending().over();
  StallSurvey before;
  const auto next_survey = [&] {
    const bool fast = options.mode == PassMode::kFast;
    return fast ? std::min(limit.deadline, executor.deadline_in(options.stall / 2)) : limit.deadline;
  };
  Deadline survey_at = next_survey();
  while (true) {
    const Deadline turn =
        options.while_waiting ? std::min(survey_at, executor.deadline_in(kUserTime)) : survey_at;
    if (over.wait_until(turn)) return over.wait();
    if (options.while_waiting) options.while_waiting();
    if (!survey_at.passed(executor.now())) continue;
    const bool late = limit.deadline.passed(executor.now());
    const StallSurvey now = queries.survey(context, pass.id());
    if (over.done()) return over.wait();  // its last messages arrived during the survey
    const bool stalled = options.mode == PassMode::kFast && now.is_stalled_since(before);
    before = now;
    survey_at = next_survey();
    if (!late && !stalled) continue;
    const char* why = stalled ? now.stall_advice()
                              : "backward() did not end within BackwardOptions::timeout; it waited for:";
    report_timeout(
        {.kind = "autograd",
         .name = "backward",
         .detail = now.waiting.substr(std::min(now.waiting.find_first_not_of(" \n"), now.waiting.size())),
         .seconds = to_seconds(executor.now() - limit.began),
         .id = pass.id()});
    // Without the name of this worker: the message names those that the pass waits for.
    pass.ending().fail(Error(ErrorKind::kTimedOut, why + now.waiting + (stalled ? "" : now.at_work)));
  }
}

/// Begins a pass, runs this worker's part, and returns when the pass has ended on all workers; throws its failure.
void run_pass(const Worker& worker, const std::shared_ptr<ContextState>& context, Registry& registry,
              const ContextQueries& queries, const std::vector<at::Tensor>& roots,
              const BackwardOptions& options) {
  check_roots(roots);
  if (options.threads == 0 || options.threads > PassKey::kMostThreads) {
    throw_invalid("BackwardOptions::threads is {}; it may be 1 to {}", options.threads,
                  PassKey::kMostThreads);
  }
  if (options.stop.stop_requested())
    throw Error(ErrorKind::kCancelled, "the program cancelled this backward pass before it began");
  const PassLimit limit{worker.runtime().executor.now(),
                        worker.runtime().executor.deadline_in(no_limit_if_zero(options.timeout))};
  const auto pass = begin_pass(worker, context, registry, options);
  PassEnding& ending = pass->ending();
  const std::stop_callback cancel(options.stop, [&ending] { ending.cancel(); });
  SpanScope span(worker.runtime().spans, SpanKind::kAutograd, "backward", pass->id());
  try {
    pass->prepare(roots);
    pass->drive();
  } catch (...) {
    ending.fail_here(to_error(std::current_exception()));
  }
  try {
    wait_for_pass(*pass, worker, *context, queries, options, limit);
  } catch (...) {
    ending.fail_here(to_error(std::current_exception()));  // effective if the wait itself failed
    // All other workers that can be reached have dropped the pass when the error is thrown.
    const Future<void> notified = ending.notified();
    try {
      notified.wait(std::chrono::milliseconds(250));
    } catch (const Error&) {
    }
    if (const auto failure = ending.failure()) throw Error(*failure);
    throw;
  }
  // Optimizers that step in backward run on the default streams.
  registry.copies()->order_after_defaults(device::Streams::current_side());
  Log& log = worker.runtime().log;
  if (log.enabled(LogLevel::kDebug)) {
    const std::chrono::duration<double, std::milli> took = worker.runtime().executor.now() - limit.began;
    log.debug(fmt::format("backward pass {:#x} in context {:#x}: {:.1f} ms", pass->id(), context->id(),
                          took.count()));
  }
}

void wait_or_stop(const Worker& worker, const Future<void>& done, Deadline deadline,
                  const std::stop_token& stop) {
  const auto either = std::make_shared<Promise<void>>(worker.backend()->continuations());
  done.add_done_callback([either](const Future<void>& end) {
    end.error() ? either->set_error(end.error()) : either->set_value();
  });
  const std::stop_callback stopped(stop, [either] {
    either->set_error(Error(ErrorKind::kCancelled, "backward(): stopped while its root was being created"));
  });
  either->future().wait(deadline);
}

}  // namespace

std::uint64_t ContextView::id() const { return state_->id(); }

void ContextView::backward(const at::Tensor& root, BackwardOptions options) const {
  backward(std::vector<at::Tensor>{root}, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, BackwardOptions options) const {
  worker_.backend()->check_running();
  const auto impl = worker_.extension<AutogradExtension>().impl();
  run_pass(worker_, state_, *impl->registry(), impl->queries(), roots, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                           BackwardOptions options) const {
  backward(scalar_of(roots, gradients), std::move(options));
}

void ContextView::backward(const RRef<at::Tensor>& root, BackwardOptions options) const {
  worker_.backend()->check_running();
  Executor& executor = worker_.runtime().executor;
  const Deadline deadline = executor.deadline_in(no_limit_if_zero(options.timeout));
  at::Tensor loss;
  if (root.is_owner()) {
    wait_or_stop(worker_, root.creation(), deadline, options.stop);
    loss = root.local_value();
  } else {
    const WorkScope scope(state_);
    auto fetched = std::make_shared<rpc::PromiseCompletion<at::Tensor>>(worker_.backend()->continuations());
    const Future<at::Tensor> value = fetched->future();
    rpc::fetch(root.state(), {.timeout = options.timeout, .stop = options.stop}, std::move(fetched));
    loss = value.wait();
  }
  options.timeout = std::max(deadline.left(executor.now()), Duration(1));  // zero means: no limit
  backward(loss, std::move(options));
}

ContextGraph ContextView::graph(const std::vector<at::Tensor>& roots) const {
  worker_.backend()->check_running();
  return worker_.extension<AutogradExtension>().impl()->queries().graph(*state_, roots);
}

void ContextView::clear_gradients(Duration timeout) const {
  worker_.backend()->check_running();
  worker_.extension<AutogradExtension>().impl()->queries().clear_gradients(*state_, timeout);
}

std::string ContextView::explain(const std::vector<at::Tensor>& roots) const { return graph(roots).dot(); }

std::vector<ParameterGradient> ContextView::gradients() const {
  worker_.runtime().check_process();
  return state_->gradients().gradients();
}

at::Tensor ContextView::gradient(const at::Tensor& parameter) const {
  worker_.runtime().check_process();
  return state_->gradients().gradient(parameter);
}

void ContextView::replace_gradient(const at::Tensor& parameter, at::Tensor gradient) const {
  worker_.runtime().check_process();
  const bool replaced = state_->change_gradients(
      [&](engine::GradientMap& gradients) { gradients.replace(parameter, std::move(gradient)); });
  if (replaced) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("a backward pass runs in autograd context {:#x}; replace gradients after it", id()))
      .with_worker(worker_.name());
}

bool ContextView::saw_backward() const { return state_->saw_pass(); }

void ContextView::add_worker(std::uint32_t rank) const {
  worker_.runtime().check_process();
  if (state_->add_worker(rank) != ContextState::Added::kEnded) return;
  throw_invalid("autograd context {:#x} has ended; make a new Context for the next step", id());
}

void ContextView::offer_gradients(GradientTaker taker) const {
  worker_.runtime().check_process();
  state_->add_taker(std::move(taker));
}

Context::Context(const Worker& worker) : ContextView(worker, nullptr) {
  worker.backend()->check_running();
  const auto impl = worker.extension<AutogradExtension>().impl();
  if (const auto* here = current_of(impl->registry()->worker())) {
    throw_invalid(
        "this thread already works in autograd context {:#x}; contexts do not nest: destroy that one first, "
        "or use it",
        here->context->id());
  }
  state_ = impl->registry()->create();
  scope_ = std::make_unique<CurrentScope>(state_);
}

Context::~Context() {
  if (!worker_.runtime().executor.process().is_current()) {
    keep_until_exit(scope_.release());  // when the process exits, the thread-local state is gone
    return;
  }
  const bool in_force = scope_->in_force();
  scope_.reset();
  try {
    if (!in_force) {
      worker_.runtime().log.error(fmt::format(
          "autograd context {:#x} was destroyed on a thread where it is not current; destroy it on the "
          "thread that created it, because the ended context stays current there",
          state_->id()));
    }
    static_cast<void>(worker_.extension<AutogradExtension>().impl()->contexts().release(state_->id()));
  } catch (...) {  // the other workers release it when this worker leaves
  }
}

void Context::release(Duration timeout) {
  const auto impl = worker_.extension<AutogradExtension>().impl();
  static_cast<void>(impl->contexts().release(state_->id()));
  impl->contexts().released(state_->id()).wait(no_limit_if_zero(timeout));
}

ContextScope::ContextScope(const ContextView& context)
    : scope_(std::make_unique<CurrentScope>(context.state_)) {}

ContextScope::~ContextScope() = default;

bool has_current() { return CurrentContexts::of_thread() != nullptr; }

bool has_current(const Worker& worker) {
  return current_of(worker.extension<AutogradExtension>().impl()->registry()->worker()) != nullptr;
}

ContextView current(const Worker& worker) {
  if (const auto* here = current_of(worker.extension<AutogradExtension>().impl()->registry()->worker()))
    return ContextView(worker, here->context);
  const CurrentContexts* others = CurrentContexts::of_thread();
  throw_invalid(others == nullptr
                    ? "this thread has no autograd context; create an autograd::Context around the call. A "
                      "handler has none either if the context in which it was called has ended"
                    : fmt::format("this thread has an autograd context of worker '{}' but none of worker "
                                  "'{}'; create an autograd::Context of that worker, too",
                                  others->entries().front().context->worker_name(), worker.name()));
}

}  // namespace torchspan::autograd
