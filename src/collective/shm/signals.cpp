#include "collective/shm/signals.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace torchspan::collective::shm {
namespace {

constexpr Duration kMaxFutexWait = std::chrono::milliseconds(100);
/// How long ranks wait for the reason if a rank dies while it writes why the group broke.
constexpr Duration kBreakageLimit = std::chrono::seconds(1);
/// How often the counts are read before anything else is checked.
constexpr int kPolls = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool Signals::reached(CountTarget target) const {
  if (target.count == Count::kUnits) {
    return control_.units_done.load(std::memory_order_acquire) >= target.target;
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (!reached_by(rank, target)) return false;
  }
  return true;
}

void Signals::publish(Count count, std::uint64_t value) {
  of(rank_).counts.of[static_cast<std::size_t>(count)].store(value, std::memory_order_release);
  wake_for(count);
}

void Signals::wake_for(Count count) {
  // With wait_on_futex(): either it reads the new count, or this reads its wait word. With another rank that publishes
  // at the same time: the later of the two reads both counts.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    WaitWord& wait_word = of(rank).wait_word;
    if (wait_word.asleep.load(std::memory_order_acquire) == 0) continue;
    if (wait_word.count.load(std::memory_order_relaxed) != count) continue;
    if (reached({count, wait_word.target.load(std::memory_order_relaxed)})) ring(rank);
  }
}

void Signals::ring(int rank) {
  WaitWord& wait_word = of(rank).wait_word;
  wait_word.futex_word.fetch_add(1, std::memory_order_seq_cst);
  if (wait_word.asleep.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &wait_word.futex_word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Signals::ring_all() {
  for (int rank = 0; rank < size(); ++rank) ring(rank);
}

std::optional<std::uint64_t> Signals::claim_unit(int region, std::uint64_t end) {
  auto& claimed = of(region).counts.units_claimed;
  std::uint64_t next = claimed.load(std::memory_order_relaxed);
  if (next >= end) return std::nullopt;
  auto& in_unit = of(rank_).counts.in_unit;
  in_unit.store(1, std::memory_order_seq_cst);
  while (next < end) {
    if (claimed.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) return next;
  }
  in_unit.store(0, std::memory_order_release);
  return std::nullopt;
}

void Signals::finish_unit(bool done) {
  if (done) control_.units_done.fetch_add(1, std::memory_order_seq_cst);
  of(rank_).counts.in_unit.store(0, std::memory_order_release);
  wake_for(Count::kUnits);
}

Signals::Outcome Signals::spin(CountTarget target, Deadline deadline,
                               const std::function<bool()>& interrupted) {
  const Deadline limit = earlier(deadline, executor_.deadline_in(executor_.spin_limit()));
  const int polls = control_.oversubscribed != 0 ? 1 : kPolls;
  do {
    for (int look = 0; look < polls; ++look) {
      if (reached(target)) return Outcome::kReached;
      relax();
    }
    if (broken()) return Outcome::kBroken;
    if (interrupted()) return Outcome::kInterrupted;
    executor_.yield();
  } while (!limit.passed(executor_.now()));
  return Outcome::kExpired;
}

void Signals::wait_on_futex(CountTarget target, Deadline deadline) {
  WaitWord& wait_word = of(rank_).wait_word;
  const std::uint32_t seen = wait_word.futex_word.load(std::memory_order_seq_cst);
  wait_word.target.store(target.target, std::memory_order_relaxed);
  wait_word.count.store(target.count, std::memory_order_relaxed);
  wait_word.asleep.store(1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!reached(target) && !broken()) {
    const Duration left = std::min(deadline.left(executor_.now()), kMaxFutexWait);
    const timespec time{static_cast<time_t>(left.count() / 1'000'000'000),
                        static_cast<long>(left.count() % 1'000'000'000)};
    syscall(SYS_futex, &wait_word.futex_word, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  wait_word.asleep.store(0, std::memory_order_seq_cst);
}

Signals::Outcome Signals::wait(CountTarget target, Deadline deadline,
                               const std::function<bool()>& interrupted) {
  if (const Outcome outcome = spin(target, deadline, interrupted); outcome != Outcome::kExpired)
    return outcome;
  while (true) {
    if (reached(target)) return Outcome::kReached;
    if (broken()) return Outcome::kBroken;
    if (interrupted()) return Outcome::kInterrupted;
    if (deadline.passed(executor_.now())) return Outcome::kExpired;
    wait_on_futex(target, deadline);
  }
}

void Signals::break_group(const Error& cause) {
  Breakage& breakage = control_.breakage;
  std::uint32_t whole = 0;
  if (breakage.state.compare_exchange_strong(whole, 1)) {
    breakage.kind = static_cast<std::uint32_t>(cause.kind());
    breakage.text_size = static_cast<std::uint32_t>(std::min(cause.message().size(), breakage.text.size()));
    std::memcpy(breakage.text.data(), cause.message().data(), breakage.text_size);
    breakage.state.store(2, std::memory_order_release);
  }
  ring_all();
}

Error Signals::breakage() {
  Breakage& breakage = control_.breakage;
  const Deadline limit = executor_.deadline_in(kBreakageLimit);
  while (breakage.state.load(std::memory_order_acquire) != 2) {
    if (limit.passed(executor_.now())) {
      return {ErrorKind::kDisconnected, "a rank of the group died while it wrote why the group broke"};
    }
    executor_.yield();
  }
  const std::size_t size = std::min<std::size_t>(breakage.text_size, breakage.text.size());
  const bool known =
      breakage.kind >= 1 && breakage.kind <= static_cast<std::uint32_t>(ErrorKind::kUnsupported);
  return {known ? static_cast<ErrorKind>(breakage.kind) : ErrorKind::kDisconnected,
          std::string(breakage.text.data(), size)};
}

void Signals::leave() {
  if (of(rank_).counts.left.exchange(1, std::memory_order_seq_cst) != 0) return;
  control_.leavers.fetch_add(1, std::memory_order_seq_cst);
  ring_all();
}

}  // namespace torchspan::collective::shm
