#include "collective/shm/conductor.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "collective/group_host.h"

namespace torchspan::collective::shm {
namespace {

/// For how long an operation is left to a caller that may be about to wait for it.
constexpr Duration kLeftToCaller = std::chrono::microseconds(100);
/// Between looks of the thread while calls come, so that they need not wake it; and how long after the last.
constexpr Duration kNap = std::chrono::microseconds(200);
constexpr Duration kLively = std::chrono::milliseconds(5);
/// Between looks at the other ranks' connections, while waiting for them.
constexpr Duration kWatch = std::chrono::milliseconds(200);

}  // namespace

/// A waiting thread takes the baton, if it is free.
class Conductor::Host final : public GroupHost {
 public:
  using GroupHost::GroupHost;
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override {
    if (const auto conductor = conductor_.lock()) {
      const Pool::BlockingScope scope(pool());
      if (conductor->take_baton()) {
        conductor->drive(&done, deadline);
        conductor->release_baton();
      }
    }
    while (!done.load(std::memory_order_acquire) && !deadline.passed(executor().now())) {
      GroupHost::wait(parker, done, deadline);
    }
  }
  void set_conductor(std::weak_ptr<Conductor> conductor) { conductor_ = std::move(conductor); }

 private:
  std::weak_ptr<Conductor> conductor_;
};

std::weak_ptr<FutureHost> Conductor::host() const { return host_; }

Conductor::Conductor(std::unique_ptr<GroupMemory> memory, Duration timeout)
    : runtime_(memory->hub()->runtime()),
      executor_(runtime_->executor),
      timeout_(timeout),
      memory_(std::move(memory)),
      signals_(memory_->signals()),
      mover_(*memory_),
      host_(std::make_shared<Host>(runtime_)),
      parker_(executor_.make_parker()) {}

std::shared_ptr<Conductor> Conductor::make(std::unique_ptr<GroupMemory> memory, Duration timeout) {
  const std::shared_ptr<Conductor> conductor(new Conductor(std::move(memory), timeout));
  conductor->start();
  return conductor;
}

void Conductor::start() {
  host_->set_conductor(weak_from_this());
  thread_ = executor_.spawn("group", [this] { run(); });
  memory_->hub()->add(weak_from_this());
}

void Conductor::stop_thread() {
  stopping_.store(true);
  signals_.interrupt();
  parker_->unpark();
  if (thread_.joinable()) thread_.join();
}

void Conductor::somebody_gone() {
  somebody_gone_.store(true);
  signals_.interrupt();
}

void Conductor::world_ended(const Error& reason) {
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

void Conductor::world_closing() {
  stop_thread();
  while (!take_baton()) executor_.yield();  // who has it was told to stop
  fail_all(breakage().value_or(Error(ErrorKind::kCancelled, "the world of this group has ended")));
  release_baton();
}

std::optional<Error> Conductor::breakage() {
  if (signals_.broken()) return signals_.breakage();
  if (!ended_.load()) return std::nullopt;
  MutexLock lock(mutex_);
  return end_;
}

Conductor::~Conductor() {
  stop_thread();
  signals_.leave();
  fail_all(Error(ErrorKind::kCancelled, "the last handle of this group went while it was pending"));
  Host::close(std::move(host_), ended_.load());
}

void Conductor::submit(std::unique_ptr<Operation> operation) {
  operation->issued = executor_.now();
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
      wake = asleep_ && !baton_taken_;
    }
  }
  if (refused) {
    refused->fail(std::make_exception_ptr(Error(*failure).with_call(describe(refused->call))));
  } else if (wake) {
    parker_->unpark();
  }
}

void Conductor::abort(const Error& cause) {
  signals_.break_group(
      Error(cause.kind(),
            fmt::format("{} aborted the group: {}", memory_->person(memory_->rank()).text, cause.message())));
  parker_->unpark();
}

bool Conductor::has_slot() const {
  return signals_.reached({Count::kFinished, posted_ + 1 > kSlots ? posted_ + 1 - kSlots : 0});
}

void Conductor::post_ready() {
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

void Conductor::run() {
  while (!stopping_.load()) {
    if (const auto until = rest()) {
      parker_->park(*until);
    } else if (take_baton()) {
      drive(nullptr, Deadline::never());
      release_baton();
    }
  }
}

std::optional<Deadline> Conductor::rest() {
  const TimePoint now = executor_.now();
  MutexLock lock(mutex_);
  asleep_ = false;
  if (!baton_taken_ && !queue_.empty()) {
    const Operation& first = *queue_.front();
    const TimePoint due = first.issued + kLeftToCaller;
    if (first.begun || now >= due || signals_.broken() || ended_.load()) return std::nullopt;
    return Deadline(due);
  }
  if (now < last_call_ + kLively) return Deadline(now + kNap);
  asleep_ = true;
  return Deadline::never();
}

bool Conductor::take_baton() {
  MutexLock lock(mutex_);
  if (baton_taken_) return false;
  baton_taken_ = true;
  return true;
}

void Conductor::release_baton() {
  bool left_over;
  {
    MutexLock lock(mutex_);
    baton_taken_ = false;
    left_over = !queue_.empty();
  }
  if (left_over) parker_->unpark();
}

Operation* Conductor::first() {
  MutexLock lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front().get();
}

void Conductor::drive(const std::atomic<bool>* done, Deadline deadline) {
  while (!stopping_.load() && (done == nullptr || !done->load(std::memory_order_acquire))) {
    Operation* const operation = first();
    if (operation == nullptr) return;
    if (const auto cause = breakage()) {
      fail_all(*cause);
      return;
    }
    try {
      Wish wish;
      if (advance(*operation, wish)) {
        finish_first();
      } else if (!await(*operation, wish, done, deadline)) {
        return;
      }
    } catch (...) {
      const Error error = to_error(std::current_exception());
      signals_.break_group(
          Error(error.kind(), fmt::format("{}: {}", describe_numbered(operation->call), error.message())));
    }
  }
}

bool Conductor::advance(Operation& operation, Wish& wish) {
  if (!operation.begun) {
    {
      MutexLock lock(mutex_);
      post_ready();
      if (posted_ <= operation.call.sequence) {
        wish = {Count::kFinished, operation.call.sequence + 1 - kSlots};
        return false;
      }
    }
    wish = {Count::kPosted, operation.call.sequence + 1};
    if (!signals_.reached(wish)) return false;
    compare_calls(operation);
    operation.begun = true;
    operation.script = operation.begin();
  }
  if (operation.script.resume()) return true;
  wish = operation.script.wish();
  return false;
}

void Conductor::compare_calls(const Operation& operation) {
  auto& calls = mover_.calls();
  calls.clear();
  const auto compare = [&](std::size_t one, std::size_t other) {
    if (agree(calls[one], calls[other])) return;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the ranks of a group must call the same, in the same order, but {} called {}, and "
                    "{} called {}",
                    memory_->person(static_cast<int>(one)).text, describe(calls[one]),
                    memory_->person(static_cast<int>(other)).text, describe(calls[other])));
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

bool Conductor::await(const Operation& operation, Wish wish, const std::atomic<bool>* done,
                      Deadline deadline) {
  const TimePoint began = executor_.now();
  const Deadline limit = operation.deadline.is_never() ? executor_.deadline_in(timeout_) : operation.deadline;
  const auto interrupted = [&] {
    return stopping_.load(std::memory_order_relaxed) || somebody_gone_.load(std::memory_order_relaxed) ||
           ended_.load(std::memory_order_relaxed) ||
           (done != nullptr && done->load(std::memory_order_relaxed));
  };
  while (true) {
    const Deadline watch = executor_.deadline_in(kWatch);
    switch (signals_.wait(wish, earlier(watch, earlier(limit, deadline)), interrupted)) {
      case Signals::Outcome::kReached:
      case Signals::Outcome::kBroken:
        return true;
      case Signals::Outcome::kInterrupted:
      case Signals::Outcome::kExpired:
        break;
    }
    if (stopping_.load()) return false;
    if (ended_.load()) return true;
    somebody_gone_.store(false);
    look_for_the_gone(operation, wish);
    if (limit.passed(executor_.now())) {
      give_up_on_the_late(operation, wish, executor_.now() - began);
      return true;
    }
    if (deadline.passed(executor_.now())) return false;
  }
}

void Conductor::finish_first() {
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

void Conductor::fail_all(const Error& cause) {
  std::deque<std::unique_ptr<Operation>> failed;
  Error first = cause;
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = cause;
    first = *failure_;
    failed.swap(queue_);
    called_ = posted_;
  }
  for (const auto& operation : failed) {
    operation->script = {};
    operation->fail(std::make_exception_ptr(Error(first).with_call(describe(operation->call))));
  }
}

void Conductor::look_for_the_gone(const Operation& operation, Wish wish) {
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (rank == memory_->rank()) continue;
    auto how = memory_->hub()->gone(memory_->members()[static_cast<std::size_t>(rank)]);
    if (signals_.has_left(rank)) how = "let go of the group";
    if (!how) continue;
    const bool needed =
        wish.count == Count::kUnits ? signals_.is_in_unit(rank) : !signals_.reached_by(rank, wish);
    if (!needed) continue;
    signals_.break_group(
        Error(ErrorKind::kDisconnected,
              fmt::format("{} is needed for {}, but it is gone: {}", memory_->person(rank).text,
                          describe_numbered(operation.call), *how)));
    return;
  }
}

void Conductor::give_up_on_the_late(const Operation& operation, Wish wish, Duration waited) {
  std::vector<std::string> late;
  const Wish posted{Count::kPosted, operation.call.sequence + 1};
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (wish.count != Count::kUnits && signals_.reached_by(rank, wish)) continue;
    if (wish.count == Count::kUnits && !signals_.is_in_unit(rank)) continue;
    const std::uint64_t calls = signals_.count(rank, Count::kPosted);
    late.push_back(signals_.reached_by(rank, posted)
                       ? fmt::format("{}, which called it, but does not go on", memory_->person(rank).text)
                       : fmt::format("{}, which made {} calls so far", memory_->person(rank).text, calls));
  }
  signals_.break_group(
      Error(ErrorKind::kTimedOut,
            fmt::format("{} waited {:.3g} s for {}; ranks of a group must call the same, in the same order",
                        describe_numbered(operation.call), std::chrono::duration<double>(waited).count(),
                        fmt::join(late, "; "))));
}

}  // namespace torchspan::collective::shm
