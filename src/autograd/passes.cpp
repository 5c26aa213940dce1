#include <fmt/format.h>

#include <torchspan/autograd/passes.h>

#include "autograd/clearing.h"
#include "autograd/current.h"
#include "autograd/given_gradients.h"
#include "autograd/protocol.h"

namespace torchspan::autograd {

Passes::Passes() = default;

Passes::~Passes() {
  if (impl_)
    impl_->abort_all(Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"));
}

void Passes::attach(rpc::Registrar& registrar) {
  impl_ = std::make_shared<Impl>(registrar);
  impl_->serve(registrar);
  serve_clearing(registrar, impl_->registry);
}

std::optional<ContextView> Passes::try_find(std::uint64_t id) const {
  auto state = impl_->registry->find(id);
  if (!state) return std::nullopt;
  return ContextView(impl_->require_worker(), std::move(state));
}

ContextView Passes::find(std::uint64_t id) const {
  if (auto context = try_find(id)) return *context;
  throw Error(ErrorKind::kInvalid,
              fmt::format("this worker knows no autograd context {:#x}: it took no part in it, or "
                          "the context has ended",
                          id));
}

PassCounts Passes::counts() const {
  PassCounts counts;
  for (const auto& context : impl_->registry->all()) {
    ++counts.contexts;
    if (context->pass()) ++counts.passes;
  }
  counts.remembered = impl_->registry->remembered();
  return counts;
}

std::uint64_t ContextView::id() const { return state_->id(); }

void ContextView::backward(const at::Tensor& root, BackwardOptions options) const {
  backward(std::vector<at::Tensor>{root}, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, BackwardOptions options) const {
  worker_.extension<Passes>().impl()->backward(state_, roots, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                           BackwardOptions options) const {
  backward(scalar_of(roots, gradients), std::move(options));
}

namespace {

void wait_or_stop(const Worker& worker, const Future<void>& done, Deadline deadline,
                  const std::stop_token& stop) {
  const auto either = std::make_shared<Promise<void>>(worker.endpoint()->host());
  done.then([either](const Future<void>& end) {
    end.error() ? either->set_error(end.error()) : either->set_value();
  });
  const std::stop_callback stopped(stop, [either] {
    either->set_error(Error(ErrorKind::kCancelled, "backward(): stopped while its root was being made"));
  });
  either->future().wait(deadline);
}

}  // namespace

void ContextView::backward(const RRef<at::Tensor>& root, BackwardOptions options) const {
  Executor& executor = worker_.runtime().executor;
  const Deadline deadline = executor.deadline_in(options.timeout);
  at::Tensor loss;
  if (root.is_owner()) {
    wait_or_stop(worker_, root.creation(), deadline, options.stop);
    loss = root.local_value();
  } else {
    const CurrentScope scope(Current{state_, nullptr, current_state().site});
    auto fetched = std::make_shared<rpc::PromiseCompletion<at::Tensor>>(worker_.endpoint()->host());
    const Future<at::Tensor> value = fetched->future();
    rpc::fetch(root.state(), {.timeout = options.timeout, .stop = options.stop}, std::move(fetched));
    loss = value.wait();
  }
  options.timeout = deadline.left(executor.now());
  backward(loss, std::move(options));
}

ContextGraph ContextView::graph(const std::vector<at::Tensor>& roots) const {
  return worker_.extension<Passes>().impl()->graph(state_, roots);
}

std::string ContextView::explain(const std::vector<at::Tensor>& roots) const { return graph(roots).dot(); }

std::vector<ParameterGradient> ContextView::gradients() const { return state_->gradients().gradients(); }

at::Tensor ContextView::gradient(const at::Tensor& parameter) const {
  return state_->gradients().gradient(parameter);
}

void ContextView::offer_gradients(GradientTaker taker) const { state_->add_taker(std::move(taker)); }

Context::Context(const Worker& worker) : ContextView(worker, nullptr) {
  if (current_state().context) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("this thread already works in autograd context {:#x}; contexts do not "
                            "nest: end the first one, or work in it",
                            current_state().context->id()));
  }
  state_ = worker.extension<Passes>().impl()->registry->create();
  scope_ = std::make_unique<CurrentScope>(Current{state_, nullptr});
}

Context::~Context() {
  if (!scope_->in_force()) {
    worker_.runtime().log.error(fmt::format(
        "autograd context {:#x} was ended by a thread that does not work in it; the thread that made it must "
        "end it, else it goes on in the ended one",
        state_->id()));
  }
  scope_.reset();
  try {
    worker_.extension<Passes>().impl()->release(state_->id());
  } catch (const Error& error) {
    worker_.runtime().log.info(
        fmt::format("autograd context {:#x} ends late: {}", state_->id(), error.what()));
  }
}

void Context::release(Duration timeout) {
  const auto impl = worker_.extension<Passes>().impl();
  impl->release(state_->id());
  impl->released(state_->id()).wait(timeout);
}

ContextScope::ContextScope(const ContextView& context)
    : scope_(std::make_unique<CurrentScope>(Current{context.state_, nullptr})) {}

ContextScope::~ContextScope() = default;

bool has_current() { return current_state().context != nullptr; }

ContextView current(const Worker& worker) {
  if (has_current()) return ContextView(worker, current_state().context);
  throw Error(ErrorKind::kInvalid,
              "this thread works in no autograd context; make an autograd::Context around the call");
}

}  // namespace torchspan::autograd
