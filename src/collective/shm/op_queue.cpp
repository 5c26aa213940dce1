#include "collective/shm/op_queue.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "collective/group_executor.h"
#include "collective/tensors.h"
#include "core/api/step_part.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective::shm {
namespace {

/// How long an operation is left for a caller that may wait for it.
constexpr Duration kLeftToCaller = std::chrono::microseconds(100);
/// The thread polls at this interval while calls arrive, and for kPollingTime after the last one, so that calls
/// need not wake it.
constexpr Duration kPollInterval = std::chrono::microseconds(200);
constexpr Duration kPollingTime = std::chrono::milliseconds(5);
/// Interval at which a waiting thread checks the other ranks' connections.
constexpr Duration kWatch = std::chrono::milliseconds(200);

/// Barriers and gathers of bytes block their callers, which the group lists and reports.
bool is_listed_by_caller(const Call& call) {
  return call.verb == Verb::kBarrier || call.verb == Verb::kExchange;
}

/// Whether all ranks have called the operation, and their data are in their slots. It can then end although the group broke
/// afterwards: no rank writes to a slot of an unfinished call.
bool is_in_slots(GroupMemory& memory, const Operation& operation) {
  if (operation.begun || !memory.signals().reached({Count::kPosted, operation.call.sequence + 1}))
    return false;
  for (int rank = 0; rank < memory.size(); ++rank) {
    const Call& call = memory.slot(rank, operation.call.sequence).call;
    if (call.bytes != 0 && call.in_slot == 0) return false;
  }
  return true;
}

}  // namespace

/// A waiting thread takes the driver lock if it is free.
class OpQueue::QueueExecutor final : public GroupExecutor {
 public:
  using GroupExecutor::GroupExecutor;
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override {
    if (const auto op_queue = op_queue_.lock()) {
      const Pool::BlockingScope scope(pool());
      if (op_queue->take_driver_lock()) {
        op_queue->drive(&done, deadline);
        op_queue->release_driver_lock();
      }
    }
    while (!done.load(std::memory_order_acquire) && !deadline.passed(executor().now())) {
      GroupExecutor::wait(parker, done, deadline);
    }
  }
  void set_op_queue(std::weak_ptr<OpQueue> op_queue) { op_queue_ = std::move(op_queue); }

 private:
  std::weak_ptr<OpQueue> op_queue_;
};

std::weak_ptr<ContinuationExecutor> OpQueue::continuations() const { return continuations_; }

void OpQueue::set_instance(std::uint64_t instance) {
  std::vector<int> ranks;
  for (int rank = 0; rank < memory_->size(); ++rank) ranks.push_back(memory_->peer(rank).world_rank);
  group_number_ = group_number(ranks, instance);
}

OpQueue::OpQueue(std::unique_ptr<GroupMemory> memory, Duration timeout)
    : runtime_(memory->peer_memory()->runtime()),
      executor_(runtime_->executor),
      timeout_(timeout),
      memory_(std::move(memory)),
      signals_(memory_->signals()),
      algorithms_(*memory_),
      continuations_(std::make_shared<QueueExecutor>(runtime_)),
      parker_(executor_.make_parker()) {
  set_instance(0);
}

std::shared_ptr<OpQueue> OpQueue::make(std::unique_ptr<GroupMemory> memory, Duration timeout) {
  const std::shared_ptr<OpQueue> op_queue(new OpQueue(std::move(memory), timeout));
  op_queue->start();
  return op_queue;
}

void OpQueue::start() {
  continuations_->set_op_queue(weak_from_this());
  thread_ = executor_.spawn("group", [this] { run(); });
  memory_->peer_memory()->add(weak_from_this());
}

void OpQueue::stop_thread() {
  stopping_.store(true);
  signals_.interrupt();
  parker_->unpark();
  if (thread_.joinable()) thread_.join();
}

void OpQueue::rank_departed() {
  rank_departed_.store(true);
  signals_.interrupt();
}

void OpQueue::world_ended(const Error& reason) {
  {
    MutexLock lock(mutex_);
    if (end_) return;
    end_ = reason;
    ended_.store(true);
  }
  signals_.leave();
  signals_.interrupt();
  parker_->unpark();
}

void OpQueue::world_closing() {
  stop_thread();
  while (!take_driver_lock()) executor_.yield();  // its holder was interrupted
  fail_all(breakage().value_or(Error(ErrorKind::kCancelled, "the world of this group has ended")));
  release_driver_lock();
}

std::optional<Error> OpQueue::breakage() {
  if (signals_.broken()) return signals_.breakage();
  if (!ended_.load()) return std::nullopt;
  MutexLock lock(mutex_);
  return end_;
}

OpQueue::~OpQueue() {
  stop_thread();
  signals_.leave();
  fail_all(Error(ErrorKind::kCancelled,
                 "the last handle of the group was dropped while this operation was pending"));
  QueueExecutor::close(std::move(continuations_), ended_.load());
}

void OpQueue::submit(std::unique_ptr<Operation> operation) {
  operation->issued = executor_.now();
  operation->call.part = StepPartScope::current();
  bool wake = false;
  std::optional<Error> failure = breakage();
  std::unique_ptr<Operation> refused;
  {
    MutexLock lock(mutex_);
    if (failure && !failure_) failure_ = failure;
    if (failure_) {
      failure = failure_;
      refused = std::move(operation);
    } else {
      operation->call.sequence = called_++;
      last_call_ = operation->issued;
      queue_.push_back(std::move(operation));
      post_ready();
      wake = asleep_ && !driving_;
    }
  }
  if (refused) {
    refused->fail(std::make_exception_ptr(Error(*failure).with_call(describe(refused->call))));
  } else if (wake) {
    parker_->unpark();
  }
}

void OpQueue::abort(const Error& cause) {
  signals_.break_group(aborted_by(memory_->peer(memory_->rank()).text, cause));
  parker_->unpark();
}

bool OpQueue::has_slot() const {
  return signals_.reached({Count::kFinished, posted_ + 1 > kSlots ? posted_ + 1 - kSlots : 0});
}

void OpQueue::post_ready() {
  const std::uint64_t first = called_ - queue_.size();
  while (posted_ < called_ && has_slot()) {
    const Operation& operation = *queue_[posted_ - first];
    Slot& slot = memory_->slot(memory_->rank(), posted_);
    slot.call = operation.call;
    std::byte* to = slot.bytes.data();
    const auto put = [&](const std::byte* from, std::size_t size) {
      if (size != 0) std::memcpy(to, from, size);
      to += size;
    };
    put(operation.note.data(), operation.note.size());
    if (operation.call.in_slot != 0) {
      for (const Piece& piece : operation.pieces) put(piece.data, piece.size);
    }
    signals_.publish(Count::kPosted, ++posted_);
  }
}

void OpQueue::run() {
  while (!stopping_.load()) {
    if (const auto until = rest()) {
      parker_->park(*until);
    } else if (take_driver_lock()) {
      drive(nullptr, Deadline::never());
      release_driver_lock();
    }
  }
}

std::optional<Deadline> OpQueue::rest() {
  const TimePoint now = executor_.now();
  MutexLock lock(mutex_);
  asleep_ = false;
  if (!driving_ && !queue_.empty()) {
    const Operation& first = *queue_.front();
    const TimePoint due = first.issued + kLeftToCaller;
    if (first.begun || now >= due || signals_.broken() || ended_.load()) return std::nullopt;
    return Deadline(due);
  }
  if (now < last_call_ + kPollingTime) return Deadline(now + kPollInterval);
  asleep_ = true;
  return Deadline::never();
}

bool OpQueue::take_driver_lock() {
  MutexLock lock(mutex_);
  if (driving_) return false;
  driving_ = true;
  return true;
}

void OpQueue::release_driver_lock() {
  bool left_over;
  {
    MutexLock lock(mutex_);
    driving_ = false;
    left_over = !queue_.empty();
  }
  if (left_over) parker_->unpark();
}

Operation* OpQueue::first() {
  MutexLock lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front().get();
}

void OpQueue::drive(const std::atomic<bool>* done, Deadline deadline) {
  while (!stopping_.load() && (done == nullptr || !done->load(std::memory_order_acquire))) {
    Operation* const operation = first();
    if (operation == nullptr) return;
    const auto cause = breakage();
    if (cause && !is_in_slots(*memory_, *operation)) {
      fail_all(*cause);
      return;
    }
    try {
      CountTarget target;
      if (advance(*operation, target)) {
        finish_first();
      } else if (!await(*operation, target, done, deadline)) {
        return;
      }
    } catch (...) {
      const Error error = to_error(std::current_exception());
      signals_.break_group(
          Error(error.kind(), fmt::format("{}, on {}: {}", describe_numbered(operation->call),
                                          memory_->peer(memory_->rank()).text, error.message())));
    }
  }
}

bool OpQueue::advance(Operation& operation, CountTarget& target) {
  if (!operation.begun) {
    {
      MutexLock lock(mutex_);
      post_ready();
      if (posted_ <= operation.call.sequence) {
        target = {Count::kFinished, operation.call.sequence + 1 - kSlots};
        return false;
      }
    }
    target = {Count::kPosted, operation.call.sequence + 1};
    if (!signals_.reached(target)) return false;
    operation.begun = true;
    compare_calls(operation);
    operation.script = operation.begin();
  }
  if (operation.script.resume()) return true;
  target = operation.script.target();
  return false;
}

void OpQueue::compare_calls(const Operation& operation) {
  auto& calls = algorithms_.calls();
  calls.clear();
  const auto compare = [&](std::size_t one, std::size_t other) {
    if (agree(calls[one], calls[other])) return;
    throw_different_calls(memory_->peer(static_cast<int>(one)).text, describe(calls[one]),
                          memory_->peer(static_cast<int>(other)).text, describe(calls[other]));
  };
  std::size_t with_entries = 0;
  for (int rank = 0; rank < memory_->size(); ++rank) {
    calls.push_back(memory_->slot(rank, operation.call.sequence).call);
    compare(0, calls.size() - 1);
    if (calls.back().entries == 0) continue;
    if (calls[with_entries].entries == 0) with_entries = calls.size() - 1;
    compare(with_entries, calls.size() - 1);
  }
}

bool OpQueue::await(Operation& operation, CountTarget target, const std::atomic<bool>* done,
                    Deadline deadline) {
  // Callers that wait for moments only, one after another, do not extend the limit.
  if (operation.awaited != target) {
    operation.awaited = target;
    operation.awaited_since = executor_.now();
  }
  const TimePoint began = operation.awaited_since;
  const Deadline limit = operation.deadline.is_never()
                             ? executor_.deadline_in(timeout_ - (executor_.now() - began))
                             : operation.deadline;
  const auto interrupted = [&] {
    return stopping_.load(std::memory_order_relaxed) || rank_departed_.load(std::memory_order_relaxed) ||
           ended_.load(std::memory_order_relaxed) ||
           (done != nullptr && done->load(std::memory_order_relaxed));
  };
  std::optional<SpanScope> stalled;
  while (true) {
    const Deadline watch = executor_.deadline_in(kWatch);
    switch (signals_.wait(target, earlier(watch, earlier(limit, deadline)), interrupted)) {
      case Signals::Outcome::kReached:
      case Signals::Outcome::kBroken:
        return true;
      case Signals::Outcome::kInterrupted:
      case Signals::Outcome::kExpired:
        break;
    }
    if (stopping_.load()) return false;
    if (ended_.load()) return true;
    if (!stalled && watch.passed(executor_.now()) && !is_listed_by_caller(operation.call)) {
      stalled.emplace(runtime_->spans, SpanKind::kWait, describe(operation.call),
                      SpanLink{.id = operation.call.sequence + 1, .part = group_number_});
    }
    rank_departed_.store(false);
    break_if_rank_departed(operation, target);
    warn_if_due(operation, target, executor_.now() - began);
    Deadline earliest = limit;  // a later operation may have less time
    {
      MutexLock lock(mutex_);
      for (const auto& queued : queue_) earliest = earlier(earliest, queued->deadline);
    }
    if (earliest.passed(executor_.now())) {
      break_for_timeout(operation, target, executor_.now() - began);
      return true;
    }
    if (deadline.passed(executor_.now())) return false;
  }
}

void OpQueue::finish_first() {
  std::unique_ptr<Operation> operation;
  {
    MutexLock lock(mutex_);
    operation = std::move(queue_.front());
    queue_.pop_front();
    signals_.publish(Count::kFinished, operation->call.sequence + 1);
    post_ready();
  }
  operation->succeed();
}

void OpQueue::fail_all(const Error& cause) {
  std::deque<std::unique_ptr<Operation>> failed;
  Error first = cause;
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = cause;
    first = *failure_;
    failed.swap(queue_);
    called_ = posted_;
  }
  const auto is_shared = [](const auto& operation) { return operation->call.shared != 0; };
  if (std::any_of(failed.begin(), failed.end(), is_shared)) memory_->await_units();
  for (const auto& operation : failed) {
    operation->script = {};
    operation->fail(std::make_exception_ptr(Error(first).with_call(describe(operation->call))));
  }
}

void OpQueue::break_if_rank_departed(const Operation& operation, CountTarget target) {
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (rank == memory_->rank()) continue;
    auto how = memory_->peer_memory()->departed(memory_->members()[static_cast<std::size_t>(rank)]);
    if (signals_.has_left(rank)) how = "it left the group";
    if (!how) continue;
    if (!is_late(rank, target)) continue;
    const std::string call = describe_numbered(operation.call);
    const auto first = signals_.has_left(rank)
                           ? std::nullopt
                           : memory_->peer_memory()->await_first_departed(memory_->members());
    const int cause = first ? static_cast<int>(first->rank) : rank;
    signals_.break_group(Error(
        ErrorKind::kDisconnected,
        fmt::format("{} is needed for {}, but it is gone: {}{}", memory_->peer(cause).text, call,
                    first ? first->how : *how,
                    cause == rank ? "" : fmt::format("; after it, {} ended too", memory_->peer(rank).text))));
    return;
  }
}

bool OpQueue::is_late(int rank, CountTarget target) const {
  return target.count == Count::kUnits ? signals_.is_in_unit(rank) : !signals_.reached_by(rank, target);
}

std::vector<std::string> OpQueue::late_ranks(const Operation& operation, CountTarget target) const {
  std::vector<std::string> late;
  const CountTarget posted{Count::kPosted, operation.call.sequence + 1};
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (!is_late(rank, target)) continue;
    const std::uint64_t calls = signals_.count(rank, Count::kPosted);
    late.push_back(signals_.reached_by(rank, posted)
                       ? fmt::format("{}, which called it, but makes no progress", memory_->peer(rank).text)
                       : fmt::format("{}, which made {} calls so far", memory_->peer(rank).text, calls));
  }
  return late;
}

void OpQueue::warn_if_due(Operation& operation, CountTarget target, Duration waited) {
  if (!is_listed_by_caller(operation.call) || !operation.warnings.due(waited)) return;
  int first = 0;
  while (first < memory_->rank() && is_late(first, target)) ++first;
  if (first != memory_->rank()) return;
  runtime_->log.warning(fmt::format(
      "{} of a group has waited {:.0f} s for {}: torchspan stacks shows what each rank does",
      describe_numbered(operation.call), to_seconds(waited), fmt::join(late_ranks(operation, target), "; ")));
}

void OpQueue::break_for_timeout(const Operation& operation, CountTarget target, Duration waited) {
  const std::vector<std::string> late = late_ranks(operation, target);
  if (!is_listed_by_caller(operation.call)) {
    report_timeout({.kind = "wait",
                    .name = describe(operation.call),
                    .detail = fmt::format("{}", fmt::join(late, "; ")),
                    .seconds = to_seconds(waited),
                    .id = operation.call.sequence + 1,
                    .part = group_number_});
  }
  signals_.break_group(
      Error(ErrorKind::kTimedOut,
            fmt::format(
                "{} waited {:.3g} s for {}; ranks of a group must call the same operations in the same order",
                describe_numbered(operation.call), to_seconds(waited), fmt::join(late, "; "))));
}

}  // namespace torchspan::collective::shm
