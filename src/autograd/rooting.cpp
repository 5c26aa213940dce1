// The worker that calls backward(): begins a pass, waits for it, and finds out why it does not end.
#include <algorithm>
#include <fmt/format.h>

#include "autograd/given_gradients.h"
#include "autograd/protocol.h"
#include "autograd/telling.h"

namespace torchspan::autograd {
namespace {

void check_roots(const std::vector<at::Tensor>& roots) {
  if (roots.empty()) throw Error(ErrorKind::kInvalid, "backward() was given no root; give it the loss");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (root.defined() && root.requires_grad() && root.numel() != 1)
      refuse_root(i, fmt::format("has {} elements; a root is a scalar: reduce it first", root.numel()));
    check_root(i, root);
  }
}

}  // namespace

/// Ids grow in the order in which passes begin: late messages of older ones are known by that.
std::shared_ptr<PassState> AutogradExtension::Impl::begin(const std::shared_ptr<ContextState>& context,
                                                          const BackwardOptions& options) {
  const Worker me = require_worker();
  std::vector<std::shared_ptr<SendNode>> gone;
  std::shared_ptr<PassState> running, pass;  // graphs may end with them, under no lock
  MutexLock beginning(context->beginning());
  running = context->pass();
  if (running) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("a backward pass, begun by worker '{}', already runs in autograd context {:#x}; wait "
                    "for it, or give each pass its own context",
                    me.endpoint()->name_of(running->root()), context->id()));
  }
  pass = std::make_shared<PassState>(
      me, context, PassKey{registry->next_id(), options.retain_graph, options.mode, options.threads});
  context->begin_pass(pass);
  if (options.mode == PassMode::kFast) gone = context->use_up_used();
  return pass;
}

void AutogradExtension::Impl::backward(const std::shared_ptr<ContextState>& context,
                                       const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  check_roots(roots);
  if (options.threads == 0 || options.threads > PassKey::kMostThreads) {
    throw Error(ErrorKind::kInvalid, fmt::format("BackwardOptions::threads is {}; it may be 1 to {}",
                                                 options.threads, PassKey::kMostThreads));
  }
  if (options.stop.stop_requested())
    throw Error(ErrorKind::kCancelled, "the program cancelled this backward pass before it began");
  Worker me = require_worker();
  const TimePoint began = me.runtime().executor.now();
  const auto pass = begin(context, options);
  const std::stop_callback cancel(options.stop, [pass] { pass->cancel(); });
  SpanScope span(me.runtime().spans, SpanKind::kAutograd, "backward", pass->id());
  try {
    pass->prepare(roots);
    pass->drive();
  } catch (...) {
    pass->fail_here(to_error(std::current_exception()));
  }
  try {
    wait(*context, *pass, options);
  } catch (...) {
    pass->fail_here(to_error(std::current_exception()));  // if it is the wait that failed
    // The others have let go of the pass when the error is thrown, unless they cannot be reached.
    const Future<void> told = pass->told();
    try {
      told.wait(std::chrono::milliseconds(250));
    } catch (const Error&) {
    }
    if (const auto failure = pass->failure()) throw Error(*failure);
    throw;
  }
  Log& log = me.runtime().log;
  if (log.enabled(LogLevel::kDebug)) {
    const std::chrono::duration<double, std::milli> took = me.runtime().executor.now() - began;
    log.debug(fmt::format("backward pass {:#x} in context {:#x}: {:.1f} ms", pass->id(), context->id(),
                          took.count()));
  }
}

void AutogradExtension::Impl::wait(ContextState& context, PassState& pass, const BackwardOptions& options) {
  Executor& executor = require_worker().runtime().executor;
  const Deadline deadline = executor.deadline_in(options.timeout);
  const Future<void> over = pass.over();
  Survey before;
  while (true) {
    Deadline next = deadline;
    if (options.mode == PassMode::kFast) next = std::min(next, executor.deadline_in(options.stall / 2));
    try {
      return over.wait(next);
    } catch (const Error& error) {
      if (over.done()) return over.wait();              // it may have ended well after the wait did
      if (error.kind() != ErrorKind::kTimedOut) throw;  // no thread may wait any longer
    }
    const bool late = deadline.passed(executor.now());
    const Survey now = survey(context, pass);
    const bool stalled = options.mode == PassMode::kFast && now.stands_still_since(before);
    before = now;
    if (!late && !stalled) continue;
    const char* why = stalled ? now.stall_advice()
                              : "backward() did not end within BackwardOptions::timeout; this is what it "
                                "waited for:";
    pass.fail_here(Error(ErrorKind::kTimedOut, why + now.waiting + (stalled ? "" : now.at_work)));
  }
}

Survey AutogradExtension::Impl::survey(ContextState& context, const PassState& pass) {
  const Worker me = require_worker();
  const AskPass question{context.id(), pass.id(), registry->next_id(), kPatience.count()};
  context.is_first_of(question.wave);
  return Survey(ask_about(context, question).wait());
}

}  // namespace torchspan::autograd
