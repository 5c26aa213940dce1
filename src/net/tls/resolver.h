#pragma once
#include <atomic>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

#include "net/tls/tls_address.h"

namespace torchspan::net {

/// Looks up host names on separate threads, because the system's resolver may take many seconds. Thread-safe.
/// The destructor waits for running look-ups.
class Resolver {
 public:
  struct Answer {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  explicit Resolver(Executor& executor) : executor_(executor) {}

  /// Calls `done` once, on the thread of the look-up. Throws kOverloaded if no thread can be started.
  void look_up(TlsPlace place, std::function<void(Answer)> done);

 private:
  struct LookUp {
    std::atomic<bool> finished{false};
    Thread thread;
  };

  Executor& executor_;
  Mutex mutex_;
  std::list<LookUp> running_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::net
