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
};

/// Counting and waiting between the ranks of one group, over memory that they share. The one place beside
/// core's parkers where a thread sleeps, since those end at the process: it spins, then sleeps on a futex in
/// the shared memory. publish() and the questions are for any thread; wait() for one at a time.
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

  /// Sets one of this rank's counts, and wakes who waited for that and nothing else.
  void publish(Count count, std::uint64_t value);
  /// Takes the next of the units of a rank's region up to `end`, if one is left, and says so until
  /// finish_unit().
  std::optional<std::uint64_t> claim_unit(int region, std::uint64_t end);
  void finish_unit();

  enum class Outcome : std::uint8_t { kReached, kBroken, kInterrupted, kExpired };
  /// Waits for `target`, awake for the executor's spin limit and then asleep, until the deadline; ends early
  /// when the group broke or when `interrupted` says so, which is asked now and then and after each
  /// interrupt().
  Outcome wait(CountTarget target, Deadline deadline, const std::function<bool()>& interrupted);
  /// Makes a wait() of this rank look about.
  void interrupt() { ring(rank_); }

  bool broken() const { return control_.breakage.state.load(std::memory_order_acquire) != 0; }
  /// Breaks the group for all ranks unless it is broken already.
  void break_group(const Error& cause);
  /// What broke the group.
  Error breakage();

  void leave();
  bool has_left(int rank) const { return of(rank).counts.left.load(std::memory_order_acquire) != 0; }
  bool is_in_unit(int rank) const { return of(rank).counts.in_unit.load(std::memory_order_acquire) != 0; }

 private:
  RankControl& of(int rank) const { return control_.ranks_control()[rank]; }
  void wake_for(Count count);
  void ring(int rank);
  void ring_all();
  Outcome spin(CountTarget target, Deadline deadline, const std::function<bool()>& interrupted);
  /// One sleep of at most a tenth of a second.
  void doze(CountTarget target, Deadline deadline);

  Executor& executor_;
  Control& control_;
  const int size_;
  const int rank_;
};

}  // namespace torchspan::collective::shm
