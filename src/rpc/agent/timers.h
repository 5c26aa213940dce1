#pragma once
#include <cstdint>
#include <map>
#include <utility>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::rpc {

/// Runs jobs at set times, on the thread of the TransportLoop. A job runs for microseconds: it posts longer
/// work. Thread-safe.
class Timers {
 public:
  struct Id {
    Deadline when;
    std::uint64_t number = 0;
    friend auto operator<=>(const Id&, const Id&) = default;
  };
  /// `earliest`: the job is due before all others, so the loop's thread may have to be woken.
  struct Added {
    Id id;
    bool earliest = false;
  };
  Added at(Deadline when, UniqueFunction<void()> job);
  /// Does nothing if the job already ran.
  void cancel(const Id& id);
  void run_due(TimePoint now);
  /// Drops all jobs, and those that come later, without running them.
  void close();
  Deadline next() const;

 private:
  mutable Mutex mutex_;
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::uint64_t counter_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<Id, UniqueFunction<void()>> jobs_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
