#pragma once
#include <cstdint>
#include <map>
#include <utility>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan::rpc {

/// Jobs for later, run by the worker's leader. A job is for microseconds: it posts what takes longer.
/// Thread-safe.
class Timers {
 public:
  struct Id {
    Deadline when;
    std::uint64_t number = 0;
    friend auto operator<=>(const Id&, const Id&) = default;
  };
  /// `earliest` tells whether the leader must be woken, since it sleeps for longer.
  struct Added {
    Id id;
    bool earliest = false;
  };
  Added at(Deadline when, UniqueFunction<void()> job);
  /// Nothing when it ran already.
  void cancel(const Id& id);
  void run_due(TimePoint now);
  Deadline next() const;

 private:
  mutable Mutex mutex_;
  std::uint64_t counter_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<Id, UniqueFunction<void()>> jobs_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::rpc
