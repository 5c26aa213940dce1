#include "autograd/passes/pass_ending.h"

#include <memory>
#include <utility>

#include <torchspan/core/future.h>

#include "autograd/messages/notification.h"
#include "autograd/passes/pass_errors.h"

namespace torchspan::autograd {

PassEnding::PassEnding(const PassParts& parts) : parts_(parts), over_(parts.worker.host()) {}

void PassEnding::watch_graph() {
  const auto pass = parts_.owner.shared_from_this();
  ContextSink& sink = parts_.graph.sink();
  sink.after_work([this, pass](const engine::PassStatus& status) { work_over(status); });
  sink.end()->last([this, pass](const engine::PassStatus& status) { end(status); });
}

void PassEnding::enter() {
  MutexLock lock(mutex_);
  if (stage_ == Stage::kFailed) throw Error(*failure_);
  if (stage_ == Stage::kOver)
    throw Error(ErrorKind::kCancelled, "this backward pass has ended on this worker");
  ++inside_;
}

void PassEnding::leave() {
  std::optional<Promise<void>> left;
  {
    MutexLock lock(mutex_);
    if (--inside_ > 0 || stage_ != Stage::kGraphDone) return;
    stage_ = Stage::kOver;
    left = std::exchange(all_left_, std::nullopt);
  }
  if (!left) return;
  // This may be the thread that delivers replies, which must not run callbacks of the program.
  if (!parts_.graph.sink().end()->is_watched()) {
    left->set_value();
    return;
  }
  parts_.owner.post([promise = std::make_shared<Promise<void>>(std::move(*left))] { promise->set_value(); });
}

void PassEnding::cancel() {
  parts_.owner.post(
      [this] { fail_here(Error(ErrorKind::kCancelled, "the program cancelled this backward pass")); });
}

/// The graph's work is over. The sink delays the end until all that entered have left.
void PassEnding::work_over(const engine::PassStatus& status) {
  if (status.error) return fail_in_node();
  Future<void> rest;
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kRunning) return;
    if (inside_ == 0) {
      stage_ = Stage::kOver;
      return;
    }
    stage_ = Stage::kGraphDone;
    // Without a host: the end runs on the thread that delivers the last reply.
    all_left_.emplace(std::weak_ptr<FutureHost>());
    rest = all_left_->future();
  }
  parts_.graph.sink().hold(std::move(rest));
}

void PassEnding::end(const engine::PassStatus& status) {
  if (status.error) return fail_here(to_error(status.error));  // of a future that the sink held
  std::optional<Answer<PropagateGradients>> answer;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed) return;
    stage_ = Stage::kEnded;
    answer = std::exchange(answer_, std::nullopt);
  }
  parts_.owner.finish();
  leave_context(std::nullopt);
  if (answer) answer->give(PartOver{});
  over_.set_value();
}

void PassEnding::answer_when_over(Answer<PropagateGradients> answer) {
  PartOver over;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed) {
      over.failure = as_remote(*failure_, parts_.worker.name());
    } else if (stage_ != Stage::kEnded) {
      answer_.emplace(std::move(answer));
      return;
    }
  }
  answer.give(over);
}

void PassEnding::fail(const Error& failure, Close where) {
  const auto pass = parts_.owner.shared_from_this();  // the context drops its reference
  std::optional<Promise<void>> left;
  std::optional<Answer<PropagateGradients>> answer;
  {
    MutexLock lock(mutex_);
    if (stage_ == Stage::kFailed || stage_ == Stage::kEnded) return;
    stage_ = Stage::kFailed;
    failure_ = failure;
    left = std::exchange(all_left_, std::nullopt);
    answer = std::exchange(answer_, std::nullopt);
  }
  const auto all_notified = std::make_shared<Promise<void>>(parts_.worker.host());
  leave_context(failure, all_notified->future());
  const Future<void> others = notify_others(failure);
  others.add_done_callback([all_notified](const Future<void>&) { all_notified->set_value(); });
  Future<void> notified = when_all<void>({others, parts_.graph.sink().takers_done()});
  {
    MutexLock lock(mutex_);
    notified_ = std::move(notified);
  }
  const Error remote = as_remote(failure, parts_.worker.name());
  if (auto parent = parts_.marks.take_parent()) parent->give(MarkedWorkers{{}, remote});
  if (answer) answer->give(PartOver{remote});
  if (where == Close::kHere) return close(failure, std::move(left));
  parts_.owner.post([this, failure, left = std::move(left)]() mutable { close(failure, std::move(left)); });
}

void PassEnding::close(const Error& failure, std::optional<Promise<void>> left) {
  if (left) left->set_error(failure);
  parts_.outbox.close();
  parts_.graph.abort(failure);
  over_.set_error(failure);  // after the callbacks of the pass's end, unless a thread is still in a node
}

void PassEnding::fail_here(const Error& cause, Close close) {
  fail(located(cause, parts_.worker.name()), close);
}

void PassEnding::fail_in_node() {
  fail(parts_.graph.failure(parts_.worker.name(), parts_.marks.reached_sends()));
}

void PassEnding::fail_without(std::uint32_t rank, const Error& cause, const std::string& through,
                              Close close) {
  const auto endpoint = parts_.worker.endpoint();
  if (!endpoint || endpoint->is_stopping())
    return fail_here(Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"), close);
  const LostWorker lost{endpoint->name_of(rank), rank, through, parts_.context.sends().calls_to(rank)};
  fail(lost_worker_failure(lost, cause, parts_.worker.name()), close);
}

void PassEnding::leave_context(const std::optional<Error>& failure, Future<void> notified) {
  if (const auto endpoint = parts_.worker.endpoint())
    endpoint->runtime().metrics.counter("autograd.counted_nodes").add(parts_.graph.counted_nodes());
  parts_.context.end_pass(parts_.key.id, parts_.owner.work(), failure, std::move(notified));
}

Future<void> PassEnding::notify_others(const Error& failure) {
  const auto endpoint = parts_.worker.endpoint();
  if (!endpoint) return make_ready_future<void>();
  return notify_all(Worker(endpoint), parts_.context,
                    AbortPass{parts_.context.id(), parts_.key.id, as_remote(failure, parts_.worker.name())});
}

std::optional<Error> PassEnding::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

Future<void> PassEnding::notified() const {
  MutexLock lock(mutex_);
  return notified_.valid() ? notified_ : make_ready_future<void>();
}

}  // namespace torchspan::autograd
