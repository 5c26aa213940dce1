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

/// Looks up host names on threads of their own, because the system's resolver may take many seconds. For any
/// thread. Its destructor waits for look-ups under way.
class Resolver {
 public:
  struct Answer {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  explicit Resolver(Executor& executor) : executor_(executor) {}

  /// `done` is called once, on the thread of the look-up. Throws kOverloaded without a thread.
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
