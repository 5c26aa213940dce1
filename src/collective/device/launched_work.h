#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/spans.h>

#include "collective/api/event_gate.h"

namespace torchspan::collective {

/// Operations that a device is working on, with what they use. Used by one thread.
class LaunchedWork {
 public:
  struct Launch {
    std::string call;
    std::string text;          ///< the operation, as in "all_reduce(Float [4], sum)"
    std::uint64_t number = 0;  ///< of the operation in its group
    TimePoint at;
    std::shared_ptr<EventGate> gate;
    std::shared_ptr<void> uses;  ///< released when the work is finished
    std::function<void()> keep;  ///< makes the memory outlast the work; for work that is released unfinished
  };

  void add(Launch launch) { launches_.push_back(std::move(launch)); }
  bool empty() const { return launches_.empty(); }
  /// Releases finished operations.
  void release_finished();
  /// The oldest operation that has been running since `since` or longer; null if there is none.
  const Launch* overdue(TimePoint since) const;
  /// Lists the oldest operation as open if it has been running since `since` or longer. `group`: number of the group.
  void list_late(SpanRecorder& spans, TimePoint since, int group);
  /// Takers of the unfinished results get `cause`.
  void fail(const Error& cause);
  /// Releases everything, after the work has been aborted.
  void release();

 private:
  std::deque<Launch> launches_;
  std::optional<SpanScope> listed_;
  std::uint64_t listed_number_ = 0;
};

}  // namespace torchspan::collective
