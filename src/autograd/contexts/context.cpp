#include <fmt/format.h>

#include <torchspan/detail/autograd/extension.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/extension_impl.h"
#include "autograd/passes/given_gradients.h"
#include "core/api/saturated_time.h"

namespace torchspan::autograd {

std::uint64_t ContextView::id() const { return state_->id(); }

void ContextView::backward(const at::Tensor& root, BackwardOptions options) const {
  backward(std::vector<at::Tensor>{root}, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, BackwardOptions options) const {
  worker_.endpoint()->check_running();
  worker_.extension<AutogradExtension>().impl()->backward(state_, roots, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                           BackwardOptions options) const {
  backward(scalar_of(roots, gradients), std::move(options));
}

namespace {

void wait_or_stop(const Worker& worker, const Future<void>& done, Deadline deadline,
                  const std::stop_token& stop) {
  const auto either = std::make_shared<Promise<void>>(worker.endpoint()->host());
  done.add_done_callback([either](const Future<void>& end) {
    end.error() ? either->set_error(end.error()) : either->set_value();
  });
  const std::stop_callback stopped(stop, [either] {
    either->set_error(Error(ErrorKind::kCancelled, "backward(): stopped while its root was being created"));
  });
  either->future().wait(deadline);
}

}  // namespace

void ContextView::backward(const RRef<at::Tensor>& root, BackwardOptions options) const {
  worker_.endpoint()->check_running();
  Executor& executor = worker_.runtime().executor;
  const Deadline deadline = executor.deadline_in(no_limit_if_zero(options.timeout));
  at::Tensor loss;
  if (root.is_owner()) {
    wait_or_stop(worker_, root.creation(), deadline, options.stop);
    loss = root.local_value();
  } else {
    const WorkScope scope(state_);
    auto fetched = std::make_shared<rpc::PromiseCompletion<at::Tensor>>(worker_.endpoint()->host());
    const Future<at::Tensor> value = fetched->future();
    rpc::fetch(root.state(), {.timeout = options.timeout, .stop = options.stop}, std::move(fetched));
    loss = value.wait();
  }
  options.timeout = std::max(deadline.left(executor.now()), Duration(1));  // zero is no limit
  backward(loss, std::move(options));
}

ContextGraph ContextView::graph(const std::vector<at::Tensor>& roots) const {
  worker_.endpoint()->check_running();
  return worker_.extension<AutogradExtension>().impl()->queries().graph(*state_, roots);
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

bool ContextView::saw_backward() const { return state_->saw_pass(); }

void ContextView::add_worker(std::uint32_t rank) const {
  worker_.runtime().check_process();
  if (state_->add_worker(rank) != ContextState::Added::kEnded) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("autograd context {:#x} has ended; make a new Context for the next step", id()));
}

void ContextView::offer_gradients(GradientTaker taker) const {
  worker_.runtime().check_process();
  state_->add_taker(std::move(taker));
}

Context::Context(const Worker& worker) : ContextView(worker, nullptr) {
  worker.endpoint()->check_running();
  const auto impl = worker.extension<AutogradExtension>().impl();
  if (const auto* here = current_of(impl->registry()->worker())) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("this thread already works in autograd context {:#x}; contexts do not "
                            "nest: destroy that one first, or use it",
                            here->context->id()));
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
  throw Error(
      ErrorKind::kInvalid,
      others == nullptr
          ? "this thread has no autograd context; create an autograd::Context around the call. A handler has "
            "none either if the context in which it was called has ended"
          : fmt::format(
                "this thread has an autograd context of worker '{}' but none of worker '{}'; create an "
                "autograd::Context of that worker, too",
                others->entries().front().context->worker_name(), worker.name()));
}

}  // namespace torchspan::autograd
