#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/core/time.h>

#include "collective/api/event_gate.h"

namespace torchspan::collective {

/// Operations that a device is working on, with what they use. Used by one thread.
class LaunchedWork {
 public:
  struct Launch {
    std::string call;
    TimePoint at;
    std::shared_ptr<EventGate> gate;
    std::shared_ptr<void> uses;  ///< released when the work is finished
  };

  void add(Launch launch) { launches_.push_back(std::move(launch)); }
  bool empty() const { return launches_.empty(); }
  /// Releases finished operations.
  void release_finished();
  /// The oldest operation that has been running since `since` or longer; null if there is none.
  const Launch* overdue(TimePoint since) const;
  /// Takers of the unfinished results get `cause`; releases everything.
  void fail(const Error& cause);

 private:
  std::deque<Launch> launches_;
};

}  // namespace torchspan::collective
