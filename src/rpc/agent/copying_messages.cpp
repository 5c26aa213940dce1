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
/// How many messages a thread that polls asks for. Timers ask for the others.
constexpr std::size_t kMostAsked = 8;
/// A thread that polls may send a message itself if the transport copies at most so many bytes for it.
constexpr std::size_t kSmall = std::size_t{256} << 10;

bool is_small(const OutgoingMessage& out) {
  std::size_t bytes = 0;
  for (const Segment& segment : out.tensors.segments) {
    if (segment.device_target == 0) bytes += segment.size;
  }
  return bytes <= kSmall;
}

}  // namespace

CopyingMessages::CopyingMessages(AgentState& state, TransportLoop& loop, Counter& bytes_sent)
    : state_(state),
      loop_(loop),
      bytes_sent_(bytes_sent),
      split_(state.runtime.metrics.counter("rpc.tensor_parts.sent")) {}

void CopyingMessages::add(OutgoingMessage out, std::shared_ptr<net::Channel> channel, Deadline deadline,
                          UniqueFunction<void(OutgoingMessage&)> next) {
  CopyingPtr copying;
  try {
    copying = std::make_shared<Copying>();
    MutexLock lock(mutex_);
    if (drops_) return;
    messages_.emplace(last_number_ + 1, copying);
    copying->number = ++last_number_;
    copying->out = std::move(out);
    copying->channel = std::move(channel);
    copying->deadline = deadline;
    copying->next = std::move(next);
    count_.fetch_add(1);
  } catch (const std::exception&) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    return next(out);
  }
  try {
    look_after(copying, kFirstPause);
  } catch (const std::exception&) {
    if (copying->busy.exchange(true)) return;  // a thread that polls has it
    copying->out.failure = std::make_exception_ptr(to_error(std::current_exception()));
    pass_on(copying);
  }
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
  if (count_.load(std::memory_order_relaxed) == 0 || looking_.exchange(true)) return;
  struct Looked {
    std::atomic<bool>& flag;
    ~Looked() { flag.store(false); }
  } const looked{looking_};
  std::vector<CopyingPtr> oldest;
  {
    MutexLock lock(mutex_);
    for (const auto& [number, copying] : messages_) {
      oldest.push_back(copying);
      if (oldest.size() == kMostAsked) break;
    }
  }
  const EnvironmentScope empty{Environment()};
  for (CopyingPtr& one : oldest) {
    if (ask(one) != Answer::kCopied) continue;
    if (is_small(one->out)) {
      pass_on(std::exchange(one, nullptr));
    } else {
      post(one);
    }
  }
}

/// Timers outlive the loop, so they do not hold the message, which may hold the agent.
void CopyingMessages::look_after(const CopyingPtr& copying, Duration pause) {
  const std::uint64_t turn = ++copying->turn;
  loop_.at(state_.runtime.executor.deadline_in(pause),
           [this, weak = std::weak_ptr<Copying>(copying), pause, turn] {
             const CopyingPtr one = weak.lock();
             if (!one || one->turn.load() != turn) return;
             if (ask(one) == Answer::kCopied) return post(one);
             if (one->turn.load() == turn) look_after(one, std::min(pause * 2, kLastPause));
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
      bytes_sent_.add(tensor->advance(copying->channel));
      if (tensor->done()) split_.add();
    }
    if (!out.ready()) {
      copying->busy.store(false);
      return look_after(copying, kFirstPause);
    }
  } catch (...) {
    out.failure = std::make_exception_ptr(to_error(std::current_exception()));
  }
  pass_on(copying);
}

void CopyingMessages::post(const CopyingPtr& copying) {
  state_.host->post([this, alive = state_.endpoint.lock(), copying] { pass_on(copying); });
}

/// Its tensors end here, on the thread that sent them.
void CopyingMessages::pass_on(const CopyingPtr& copying) {
  {
    MutexLock lock(mutex_);
    if (messages_.erase(copying->number) == 0) return;  // dropped
    count_.fetch_sub(1);
  }
  OutgoingMessage out = std::move(copying->out);
  std::exchange(copying->next, nullptr)(out);
}

void CopyingMessages::drop() {
  std::map<std::uint64_t, CopyingPtr> dropped;
  MutexLock lock(mutex_);
  drops_ = true;
  dropped.swap(messages_);
  count_.store(0);
}

}  // namespace torchspan::rpc
