#include <fmt/format.h>

#include <torchspan/autograd/passes.h>

#include "autograd/current.h"
#include "autograd/interceptor.h"
#include "autograd/messages.h"

namespace torchspan::autograd {

/// The worker's side of the protocol: starts passes, serves gradients, aborts and releases.
class Passes::Impl : public std::enable_shared_from_this<Passes::Impl> {
 public:
  explicit Impl(rpc::Registrar& registrar)
      : worker(registrar.worker().endpoint()->weak_from_this()),
        host(registrar.host()),
        registry(std::make_shared<Registry>(registrar.worker().rank())),
        interceptor(registrar.runtime(), registry) {}

  Worker require_worker() const {
    auto endpoint = worker.lock();
    if (!endpoint) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return Worker(endpoint);
  }

  std::shared_ptr<PassState> join(std::uint64_t context_id, const PassKey& key);
  Future<Unit> propagate(PropagateGradients message);
  Future<MarkedWorkers> mark(const MarkSends& message);
  void marks_are_final(const MarksFinal& message);
  void release(std::uint64_t id);
  void backward(const std::shared_ptr<ContextState>& context, const std::vector<at::Tensor>& roots,
                const BackwardOptions& options);
  void abort_all(const std::function<bool(const ContextState&)>& concerned, const Error& error);

  const std::weak_ptr<rpc::Endpoint> worker;
  const std::weak_ptr<FutureHost> host;
  const std::shared_ptr<Registry> registry;
  EdgeInterceptor interceptor;
};

namespace {

/// A failure on this worker as the worker that waits for us hears it.
Error as_remote(const Worker& worker, const std::exception_ptr& cause) {
  const Error error = to_error(cause);
  if (error.kind() == ErrorKind::kRemoteFailure) return error;
  return Error(ErrorKind::kRemoteFailure,
               fmt::format("backward failed on worker '{}': {}", worker.name(), error.message()))
      .with_frame({worker.name(), error.call().empty() ? "backward" : error.call(), "torchspan::Error",
                   error.message()});
}

void check_roots(const std::vector<at::Tensor>& roots) {
  if (roots.empty()) throw Error(ErrorKind::kInvalid, "backward() was given no root; give it the loss");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    auto refuse = [&](const std::string& why) {
      throw Error(ErrorKind::kInvalid, fmt::format("backward(): root {} {}", i, why));
    };
    if (!root.defined()) refuse("is undefined");
    if (!root.requires_grad()) refuse("does not require grad: nothing that it was computed from does");
    if (root.numel() != 1)
      refuse(fmt::format("has {} elements; a root is a scalar: reduce it first", root.numel()));
    if (!root.grad_fn()) refuse("is a leaf: it has no graph to go back through");
  }
}

}  // namespace

/// The pass that a message belongs to: the one that runs, or a new one that begins here.
std::shared_ptr<PassState> Passes::Impl::join(std::uint64_t context_id, const PassKey& key) {
  auto context = registry->find(context_id);
  if (!context) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released before its pass was over", context_id));
  }
  MutexLock beginning(context->beginning());
  auto pass = context->pass();
  if (pass && pass->id() == key.id) return pass;
  pass = std::make_shared<PassState>(require_worker(), context, key);
  if (context->begin_pass(pass)) {
    pass->prepare({});
    return pass;
  }
  throw Error(
      ErrorKind::kInvalid,
      "two backward passes run in one autograd context at once; run one after the other, or give each "
      "its own context");
}

Future<Unit> Passes::Impl::propagate(PropagateGradients message) {
  const PassMode mode = message.reached.empty() ? PassMode::kFast : PassMode::kSmart;
  const auto pass = join(message.context, {message.pass, message.retain_graph, mode});
  Future<Unit> part_done = make_ready_future<Unit>();
  if (pass->claim_first_gradients()) {
    auto promise = std::make_shared<Promise<Unit>>(host);
    part_done = promise->future();
    pass->after([promise, me = require_worker()](const engine::PassStatus& status) {
      if (status.ok()) {
        promise->set_value();
      } else {
        promise->set_error(as_remote(me, status.error));
      }
    });
  }
  pass->receive(std::move(message));
  pass->drive();
  return part_done;
}

Future<MarkedWorkers> Passes::Impl::mark(const MarkSends& message) {
  return join(message.context, {message.pass, message.retain_graph, PassMode::kSmart})->mark(message.sends);
}

void Passes::Impl::marks_are_final(const MarksFinal& message) {
  auto context = registry->find(message.context);
  auto pass = context ? context->pass() : nullptr;
  if (pass && pass->id() == message.pass) pass->marks_are_final();
}

void Passes::Impl::release(std::uint64_t id) {
  auto context = registry->remove(id);
  if (!context || !context->release()) return;
  if (auto pass = context->pass()) {
    pass->fail(Error(ErrorKind::kCancelled, "the autograd context was released while its backward pass ran"));
  }
  auto endpoint = worker.lock();
  if (!endpoint) return;
  Worker me(endpoint);
  for (std::uint32_t rank : context->workers()) {
    if (rank != me.rank()) me.request(Destination(rank), ReleaseContext{id});
  }
}

void Passes::Impl::backward(const std::shared_ptr<ContextState>& context,
                            const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  check_roots(roots);
  Worker me = require_worker();
  auto pass = std::make_shared<PassState>(me, context,
                                          PassKey{registry->next_id(), options.retain_graph, options.mode});
  if (!context->begin_pass(pass)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a backward pass already runs in autograd context {:#x}; wait for it, "
                            "or give each pass its own context",
                            context->id()));
  }
  const Deadline deadline = me.runtime().executor.deadline_in(options.timeout);
  SpanScope span(me.runtime().spans, SpanKind::kAutograd, "backward", pass->id());
  // The end wakes this thread through a future, so that the worker drives and counts the wait.
  auto ended = std::make_shared<Promise<void>>(host);
  Future<void> end = ended->future();
  try {
    pass->after([ended](const engine::PassStatus& status) {
      if (status.ok()) {
        ended->set_value();
      } else {
        ended->set_error(status.error);
      }
    });
    pass->prepare(roots);
    pass->drive();
    end.wait(deadline);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimedOut || end.done()) {
      pass->fail(error);
      throw;
    }
    const Error stalled(
        ErrorKind::kTimedOut,
        fmt::format("backward() did not end in time; these sends got no gradient, perhaps because their "
                    "results are not part of the loss:{}",
                    pass->describe_waiting()));
    pass->fail(stalled);
    throw stalled;
  }
}

void Passes::Impl::abort_all(const std::function<bool(const ContextState&)>& concerned, const Error& error) {
  for (const auto& context : registry->all()) {
    if (!concerned(*context)) continue;
    if (auto pass = context->pass()) pass->fail(error);
  }
}

Passes::Passes() = default;

Passes::~Passes() {
  if (!impl_) return;
  impl_->abort_all([](const ContextState&) { return true; },
                   Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"));
}

void Passes::attach(rpc::Registrar& registrar) {
  impl_ = std::make_shared<Impl>(registrar);
  registrar.intercept(impl_->interceptor);
  std::weak_ptr<Impl> weak = impl_;
  auto impl = [weak] {
    auto alive = weak.lock();
    if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
    return alive;
  };
  registrar.handle<PropagateGradients>(rpc::RunOn::kPool,
                                       [impl](const rpc::CallInfo&, PropagateGradients message) {
                                         return impl()->propagate(std::move(message));
                                       });
  registrar.handle<MarkSends>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const MarkSends& message) {
    return impl()->mark(message);
  });
  registrar.handle<MarksFinal>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const MarksFinal& message) {
    impl()->marks_are_final(message);
    return Unit{};
  });
  registrar.handle<AbortPass>(rpc::RunOn::kPool, [impl](const rpc::CallInfo&, const AbortPass& message) {
    auto context = impl()->registry->find(message.context);
    if (!context) return Unit{};
    context->remember_aborted(message.pass, message.reason);
    auto pass = context->pass();
    if (pass && pass->id() == message.pass) pass->aborted_elsewhere(message.reason);
    return Unit{};
  });
  registrar.handle<ReleaseContext>(rpc::RunOn::kPool,
                                   [impl](const rpc::CallInfo&, const ReleaseContext& message) {
                                     impl()->release(message.context);
                                     return Unit{};
                                   });
  registrar.on_departure([impl](std::uint32_t rank, const Error& reason) {
    impl()->abort_all([rank](const ContextState& context) { return context.workers().contains(rank); },
                      reason);
  });
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
  return counts;
}

std::uint64_t ContextView::id() const { return state_->id(); }

void ContextView::backward(const at::Tensor& root, BackwardOptions options) const {
  backward(std::vector<at::Tensor>{root}, options);
}

void ContextView::backward(const std::vector<at::Tensor>& roots, BackwardOptions options) const {
  worker_.extension<Passes>().impl()->backward(state_, roots, options);
}

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
  scope_.reset();
  try {
    worker_.extension<Passes>().impl()->release(state_->id());
  } catch (const Error& error) {
    worker_.runtime().log.info(
        fmt::format("autograd context {:#x} ends late: {}", state_->id(), error.what()));
  }
}

bool has_current() { return current_state().context != nullptr; }

ContextView current(const Worker& worker) {
  if (has_current()) return ContextView(worker, current_state().context);
  throw Error(ErrorKind::kInvalid,
              "this thread works in no autograd context; make an autograd::Context around the call");
}

}  // namespace torchspan::autograd
