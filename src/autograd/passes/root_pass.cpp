#include "autograd/passes/root_pass.h"

#include <algorithm>
#include <fmt/format.h>
#include <stop_token>

#include <torchspan/detail/core/spans.h>

#include "autograd/passes/given_gradients.h"
#include "core/api/saturated_time.h"
#include "core/api/timeout_notice.h"

namespace torchspan::autograd {
namespace {

void check_roots(const std::vector<at::Tensor>& roots) {
  if (roots.empty()) throw Error(ErrorKind::kInvalid, "backward() got no root; pass it the loss");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (root.defined() && root.requires_grad() && root.numel() != 1)
      refuse_root(i, fmt::format("has {} elements; a root is a scalar: reduce it first", root.numel()));
    check_root(i, root);
  }
}

}  // namespace

/// Ids grow in the order in which passes begin, so that late messages of earlier passes are recognized.
std::shared_ptr<PassState> RootPass::begin(const BackwardOptions& options) {
  std::vector<SendNodePtr> gone;
  std::shared_ptr<PassState> running, pass;  // their graphs may be destroyed after the lock is released
  MutexLock beginning(context_->beginning());
  running = context_->pass();
  if (running) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("a backward pass, begun by worker '{}', already runs in autograd context {:#x}; wait "
                    "for it, or use one context for each pass",
                    worker_.endpoint()->name_of(running->root()), context_->id()));
  }
  pass = std::make_shared<PassState>(
      worker_, context_, PassKey{registry_.next_id(), options.retain_graph, options.mode, options.threads});
  context_->begin_pass(pass);
  if (options.mode == PassMode::kFast) gone = context_->sends().use_up_used();
  return pass;
}

void RootPass::run(const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  check_roots(roots);
  if (options.threads == 0 || options.threads > PassKey::kMostThreads) {
    throw Error(ErrorKind::kInvalid, fmt::format("BackwardOptions::threads is {}; it may be 1 to {}",
                                                 options.threads, PassKey::kMostThreads));
  }
  if (options.stop.stop_requested())
    throw Error(ErrorKind::kCancelled, "the program cancelled this backward pass before it began");
  const Limit limit{worker_.runtime().executor.now(),
                    worker_.runtime().executor.deadline_in(no_limit_if_zero(options.timeout))};
  const auto pass = begin(options);
  PassEnding& ending = pass->ending();
  const std::stop_callback cancel(options.stop, [&ending] { ending.cancel(); });
  SpanScope span(worker_.runtime().spans, SpanKind::kAutograd, "backward", pass->id());
  try {
    pass->prepare(roots);
    pass->drive();
  } catch (...) {
    ending.fail_here(to_error(std::current_exception()));
  }
  try {
    wait(*pass, options, limit);
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
  registry_.copies()->order_after_defaults(device::Streams::current_side());
  Log& log = worker_.runtime().log;
  if (log.enabled(LogLevel::kDebug)) {
    const std::chrono::duration<double, std::milli> took = worker_.runtime().executor.now() - limit.began;
    log.debug(fmt::format("backward pass {:#x} in context {:#x}: {:.1f} ms", pass->id(), context_->id(),
                          took.count()));
  }
}

void RootPass::wait(PassState& pass, const BackwardOptions& options, const Limit& limit) {
  Executor& executor = worker_.runtime().executor;
  const Future<void> over = pass.ending().over();
  StallSurvey before;
  while (true) {
    Deadline next = limit.deadline;
    if (options.mode == PassMode::kFast) next = std::min(next, executor.deadline_in(options.stall / 2));
    if (over.wait_until(next)) return over.wait();
    const bool late = limit.deadline.passed(executor.now());
    const StallSurvey now = queries_.survey(*context_, pass.id());
    if (over.done()) return over.wait();  // its last messages arrived during the survey
    const bool stalled = options.mode == PassMode::kFast && now.is_stalled_since(before);
    before = now;
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

}  // namespace torchspan::autograd
