#pragma once
#include <atomic>
#include <string_view>

#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// The name of the operation of a thread that waits for a future; its kind is SpanKind::kWait.
inline constexpr std::string_view kFutureWait = "wait for a future";

/// Calls `wait(deadline)`, which returns when `done` is true or at the deadline. After 0.2 s the wait is listed as an
/// open operation and recorded as a span; a shorter one only reads the clock.
template <class Wait>
void wait_listed(SpanRecorder& spans, const std::atomic<bool>& done, Deadline deadline, const Wait& wait) {
  constexpr Duration kListedAfter = std::chrono::milliseconds(200);
  const Deadline listed = spans.executor().deadline_in(kListedAfter);
  wait(earlier(deadline, listed));
  if (done.load(std::memory_order_acquire) || deadline.passed(spans.executor().now())) return;
  const SpanScope scope(spans, SpanKind::kWait, kFutureWait);
  wait(deadline);
}

}  // namespace torchspan
