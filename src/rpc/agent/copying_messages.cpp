#include "rpc/agent/copying_messages.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace torchspan::rpc {
namespace {

/// How long to wait before devices are asked again whether a copy is complete, if no thread polls: doubled from the
/// first to the last.
constexpr Duration kFirstCopyPause = std::chrono::microseconds(20);
constexpr Duration kLastCopyPause = std::chrono::milliseconds(1);
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
    if (copying->out.split.empty()) whole_.fetch_add(1);
  }
  wait_for(copying, kFirstCopyPause);
}

bool CopyingMessages::soon_ready(OutgoingMessage& out) const {
  Executor& executor = state_.runtime.executor;
  const TimePoint end = executor.now() + std::min(kSoon, executor.spin_limit());
  for (; out.split.empty() && executor.now() < end; executor.yield()) {
    if (out.ready()) return true;
  }
  return false;
}

bool CopyingMessages::take_if_copied(Copying& copying) {
  if (copying.looked_at.exchange(true)) return false;
  try {
    if (copying.out.ready()) return true;
  } catch (...) {  // the device has failed
    copying.out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    return true;
  }
  copying.looked_at.store(false);
  return false;
}

void CopyingMessages::look() {
  if (whole_.load(std::memory_order_relaxed) == 0) return;
  std::vector<CopyingPtr> waiting;
  {
    MutexLock lock(mutex_);
    for (const CopyingPtr& one : messages_) {
      if (one->out.split.empty()) waiting.push_back(one);
    }
  }
  for (const CopyingPtr& one : waiting) {
    if (take_if_copied(*one) && remove(one)) one->next(one->out);
  }
}

/// Timers outlive the loop, so they do not hold the message, which may hold the agent. Sending a part may take longer
/// than the loop may be kept, so the pool does it.
void CopyingMessages::wait_for(const CopyingPtr& copying, Duration pause) {
  loop_.at(state_.runtime.executor.deadline_in(pause), [this, weak = std::weak_ptr<Copying>(copying), pause] {
    CopyingPtr one = weak.lock();
    if (!one) return;
    const auto& split = one->out.split;
    try {
      const bool late = !split.empty() && one->deadline.passed(state_.runtime.executor.now());
      if (late || std::ranges::any_of(split, [](const auto& tensor) { return tensor->can_advance(); })) {
        return state_.host->post(
            [this, alive = state_.endpoint.lock(), one = std::move(one)] { send_parts(one); });
      }
    } catch (...) {  // the device has failed
      one->out.failure = std::make_exception_ptr(to_error(std::current_exception()));
      return finish(std::move(one));
    }
    if (!take_if_copied(*one)) return wait_for(one, std::min(pause * 2, kLastCopyPause));
    finish(std::move(one));
  });
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
  } catch (...) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
  }
  if (!out.failure && !out.ready()) return wait_for(copying, kFirstCopyPause);
  finish(copying);
}

bool CopyingMessages::remove(const CopyingPtr& copying) {
  MutexLock lock(mutex_);
  if (messages_.erase(copying) == 0) return false;
  if (copying->out.split.empty()) whole_.fetch_sub(1);
  return true;
}

void CopyingMessages::finish(CopyingPtr copying) {
  if (!remove(copying)) return;
  state_.host->post([alive = state_.endpoint.lock(), one = std::move(copying)] { one->next(one->out); });
}

void CopyingMessages::drop() {
  std::set<CopyingPtr> dropped;
  MutexLock lock(mutex_);
  drops_ = true;
  dropped.swap(messages_);
  whole_.store(0);
}

}  // namespace torchspan::rpc
