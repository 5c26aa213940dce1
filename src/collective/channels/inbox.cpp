#include "collective/channels/inbox.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::collective::channels {
namespace {

constexpr Duration kBetweenChecks = std::chrono::milliseconds(20);

}  // namespace

Inbox::Inbox(Executor& executor, std::vector<std::string> peers, int self)
    : executor_(executor),
      peers_(std::move(peers)),
      self_(self),
      parker_(executor.make_parker()),
      calls_(peers_.size()) {}

void Inbox::check_while_waiting(std::function<std::optional<Error>()> interrupted) {
  interrupted_ = std::move(interrupted);
}

void Inbox::on_failure(std::function<void()> wake) {
  MutexLock lock(mutex_);
  wake_ = std::move(wake);
}

void Inbox::put(const PartKey& key, std::uint64_t calls, Buffer data) {
  bool wanted = false;
  {
    MutexLock lock(mutex_);
    std::uint64_t& known = calls_[static_cast<std::size_t>(key.rank)];
    known = std::max(known, calls);
    parts_.insert_or_assign(key, std::move(data));
    wanted = awaited_ == key;
  }
  if (wanted) parker_->unpark();
}

void Inbox::end(int rank, int lane, const std::string& why) {
  {
    MutexLock lock(mutex_);
    ended_.emplace(std::pair(rank, lane), why);
  }
  parker_->unpark();
}

bool Inbox::fail(const Error& cause, std::uint64_t from_call) {
  std::function<void()> wake;
  {
    MutexLock lock(mutex_);
    if (failure_ && from_call >= failed_from_) return false;
    failed_from_ = from_call;
    if (!failure_) {
      failure_ = cause;
      wake = wake_;
    }
  }
  parker_->unpark();
  if (wake) wake();
  return true;
}

std::optional<Error> Inbox::failure() {
  MutexLock lock(mutex_);
  return failure_;
}

std::optional<Abort> Inbox::announcement() {
  MutexLock lock(mutex_);
  if (!failure_) return std::nullopt;
  return Abort{failure_->kind(), failed_from_, failure_->message()};
}

std::optional<Error> Inbox::call_failure() {
  MutexLock lock(mutex_);
  return has_failed() ? failure_ : std::nullopt;
}

void Inbox::throw_if_failed() {
  MutexLock lock(mutex_);
  if (has_failed()) throw Error(*failure_);
}

Buffer Inbox::take(const PartKey& key, int lane, Deadline deadline) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      awaited_ = key;
      // First, because ranks that have completed the call do not wait for this one.
      const auto found = parts_.find(key);
      if (found != parts_.end()) {
        Buffer data = std::move(found->second);
        parts_.erase(found);
        awaited_.reset();
        return data;
      }
      if (has_failed()) throw Error(*failure_);
      if (const auto ended = ended_.find({key.rank, lane}); ended != ended_.end()) {
        throw Error(ErrorKind::kDisconnected,
                    fmt::format("{} {}, and the group cannot continue without it",
                                peers_[static_cast<std::size_t>(key.rank)], ended->second));
      }
    }
    const TimePoint now = executor_.now();
    if (deadline.passed(now)) throw Error(ErrorKind::kTimedOut, "its data did not arrive in time");
    parker_->park(interrupted_ ? earlier(deadline, Deadline(now + kBetweenChecks)) : deadline);
    if (const auto error = interrupted_ ? interrupted_() : std::nullopt) throw Error(*error);
  }
}

void Inbox::pause(Duration time) {
  parker_->park(executor_.deadline_in(time));
  throw_if_failed();
}

void Inbox::begin(std::uint64_t calls) {
  MutexLock lock(mutex_);
  begun_ = calls;
}

std::string Inbox::awaited() {
  MutexLock lock(mutex_);
  if (!awaited_) return {};
  std::vector<std::string> late;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (calls_[rank] >= begun_ || static_cast<int>(rank) == self_) continue;
    late.push_back(fmt::format("{}, which made {} calls so far", peers_[rank], calls_[rank]));
  }
  if (late.empty()) {
    late.push_back(fmt::format("{}, which called it, but makes no progress",
                               peers_[static_cast<std::size_t>(awaited_->rank)]));
  }
  return fmt::format("{}", fmt::join(late, "; "));
}

}  // namespace torchspan::collective::channels
