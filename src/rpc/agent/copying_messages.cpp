#include "rpc/agent/copying_messages.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace torchspan::rpc {
namespace {

/// How long to wait before devices are asked again whether a copy is complete, if no thread polls: doubled from the
/// first to the last.
constexpr Duration kFirstPause = std::chrono::microseconds(20);
constexpr Duration kLastPause = std::chrono::milliseconds(1);
/// How long a thread that replies waits for small copies.
constexpr Duration kSoon = std::chrono::microseconds(20);

}  // namespace

CopyingMessages::CopyingMessages(AgentState& state, TransportLoop& loop, Counter& bytes_sent)
    : state_(state),
      loop_(loop),
      bytes_sent_(bytes_sent),
      split_(state.runtime.metrics.counter("rpc.tensor_parts.sent")) {}

void CopyingMessages::add(OutgoingMessage out, std::shared_ptr<net::Channel> channel, Deadline deadline,
                          UniqueFunction<void(OutgoingMessage&)> next) {
  const CopyingPtr copying(new Copying{std::move(out), std::move(channel), deadline, std::move(next)});
  {
    MutexLock lock(mutex_);
    if (drops_) return;
    messages_.insert(copying);
    count_.fetch_add(1);
  }
  look_after(copying, kFirstPause);
}

bool CopyingMessages::soon_ready(OutgoingMessage& out) const {
  Executor& executor = state_.runtime.executor;
  const TimePoint end = executor.now() + std::min(kSoon, executor.spin_limit());
  for (; out.split.empty() && executor.now() < end; executor.yield()) {
    if (out.ready()) return true;
  }
  return false;
}

/// The thread may be a user's that waits: nothing of its own work may affect what is sent.
void CopyingMessages::look() {
  if (count_.load(std::memory_order_relaxed) == 0) return;
  std::vector<CopyingPtr> waiting;
  {
    MutexLock lock(mutex_);
    waiting.assign(messages_.begin(), messages_.end());
  }
  for (const CopyingPtr& one : waiting) {
    if (ask(one) != Answer::kCopied || !remove(one)) continue;
    const EnvironmentScope empty{Environment()};
    one->next(one->out);
  }
}

/// Timers outlive the loop, so they do not hold the message, which may hold the agent.
void CopyingMessages::look_after(const CopyingPtr& copying, Duration pause) {
  loop_.at(state_.runtime.executor.deadline_in(pause), [this, weak = std::weak_ptr<Copying>(copying), pause] {
    const CopyingPtr one = weak.lock();
    if (!one) return;
    const Answer answer = ask(one);
    if (answer == Answer::kCopied) return finish(one);
    look_after(one, answer == Answer::kWaits ? std::min(pause * 2, kLastPause) : kFirstPause);
  });
}

/// Sending a part may take longer than a thread that polls may be kept, so the pool does it.
CopyingMessages::Answer CopyingMessages::ask(const CopyingPtr& copying) {
  if (copying->busy.exchange(true)) return Answer::kBusy;
  OutgoingMessage& out = copying->out;
  try {
    const bool late = !out.split.empty() && copying->deadline.passed(state_.runtime.executor.now());
    if (late || std::ranges::any_of(out.split, [](const auto& tensor) { return tensor->can_advance(); })) {
      state_.host->post([this, alive = state_.endpoint.lock(), copying] { send_parts(copying); });
      return Answer::kBusy;
    }
    if (out.ready()) return Answer::kCopied;
  } catch (...) {  // the device has failed
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    return Answer::kCopied;
  }
  copying->busy.store(false);
  return Answer::kWaits;
}

void CopyingMessages::send_parts(const CopyingPtr& copying) {
  OutgoingMessage& out = copying->out;
  try {
    if (copying->deadline.passed(state_.runtime.executor.now()))
      throw Error(ErrorKind::kTimedOut, "the deadline passed while parts of its tensors were sent");
    for (const SplitTensorPtr& tensor : out.split) {
      if (tensor->done()) continue;
      const std::size_t before = tensor->sent();
      tensor->advance(copying->channel);
      bytes_sent_.add(tensor->sent() - before);
      if (tensor->done()) split_.add();
    }
    if (!out.ready()) return copying->busy.store(false);
  } catch (...) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
  }
  if (remove(copying)) copying->next(out);
}

bool CopyingMessages::remove(const CopyingPtr& copying) {
  MutexLock lock(mutex_);
  if (messages_.erase(copying) == 0) return false;
  count_.fetch_sub(1);
  return true;
}

void CopyingMessages::finish(const CopyingPtr& copying) {
  if (!remove(copying)) return;
  state_.host->post([alive = state_.endpoint.lock(), copying] { copying->next(copying->out); });
}

void CopyingMessages::drop() {
  std::set<CopyingPtr> dropped;
  MutexLock lock(mutex_);
  drops_ = true;
  dropped.swap(messages_);
  count_.store(0);
}

}  // namespace torchspan::rpc
