#pragma once
#include <functional>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

#include "collective/shm/control.h"

namespace torchspan::collective::shm {

/// A count that every rank, or the group, must reach.
struct CountTarget {
  Count count = Count::kPosted;
  std::uint64_t target = 0;
  bool operator==(const CountTarget&) const = default;
};

/// Counts of the ranks of one group, in shared memory, and waiting for them: spins, then sleeps on a futex in
/// the shared memory, because core's parkers work only inside one process. publish() and the queries are
/// thread-safe; one thread at a time may call wait().
class Signals {
 public:
  Signals(Executor& executor, Control& control, int rank)
      : executor_(executor), control_(control), size_(static_cast<int>(control.ranks)), rank_(rank) {}

  int size() const { return size_; }
  Control& control() const { return control_; }
  std::uint64_t count(int rank, Count count) const {
    return of(rank).counts.of[static_cast<std::size_t>(count)].load(std::memory_order_acquire);
  }
  bool reached(CountTarget target) const;
  bool reached_by(int rank, CountTarget target) const { return count(rank, target.count) >= target.target; }

  /// Sets one of this rank's counts, and wakes the ranks whose target this completes.
  void publish(Count count, std::uint64_t value);
  /// Claims the next unit of a rank's region, up to `end`; nullopt if none is left. is_in_unit() is true
  /// until finish_unit(), which counts the unit unless the group cannot continue (`done` is false).
  std::optional<std::uint64_t> claim_unit(int region, std::uint64_t end);
  void finish_unit(bool done = true);

  enum class Outcome : std::uint8_t { kReached, kBroken, kInterrupted, kExpired };
  /// Waits for `target` until the deadline: spins for the executor's spin limit, then sleeps. Returns early
  /// if the group is broken or `interrupted` returns true, which is called from time to time and after each
  /// interrupt().
  Outcome wait(CountTarget target, Deadline deadline, const std::function<bool()>& interrupted);
  /// Makes wait() on this rank call `interrupted`.
  void interrupt() { ring(rank_); }

  bool broken() const { return control_.breakage.state.load(std::memory_order_acquire) != 0; }
  /// Breaks the group for all ranks unless it is broken already.
  void break_group(const Error& cause);
  /// Why the group is broken.
  Error breakage();

  void leave();
  bool has_left(int rank) const {
    return control_.leavers.load(std::memory_order_acquire) != 0 &&
           of(rank).counts.left.load(std::memory_order_acquire) != 0;
  }
  bool is_in_unit(int rank) const { return of(rank).counts.in_unit.load(std::memory_order_acquire) != 0; }

 private:
  RankControl& of(int rank) const { return control_.ranks_control()[rank]; }
  void wake_for(Count count);
  void ring(int rank);
  void ring_all();
  Outcome spin(CountTarget target, Deadline deadline, const std::function<bool()>& interrupted);
  /// Sleeps once, for at most 100 ms.
  void wait_on_futex(CountTarget target, Deadline deadline);

  Executor& executor_;
  Control& control_;
  const int size_;
  const int rank_;
};

}  // namespace torchspan::collective::shm
