#include "collective/device/host_wait.h"

namespace torchspan::collective {
namespace {

/// How long the thread yields, and then how long it sleeps, between two looks at the device.
constexpr Duration kYielding = std::chrono::microseconds(200);
constexpr Duration kSleep = std::chrono::microseconds(50);

}  // namespace

void wait_on_host(const device::Mark& end, Executor& executor, Duration timeout,
                  const std::function<void(Duration)>& check, const std::function<Error()>& late) {
  const TimePoint began = executor.now();
  const Deadline deadline = executor.deadline_in(timeout);
  std::unique_ptr<Parker> parker;
  while (!end.reached()) {
    const TimePoint now = executor.now();
    check(now - began);
    if (deadline.passed(now)) throw late();
    if (now - began < kYielding) {
      executor.yield();
      continue;
    }
    if (!parker) parker = executor.make_parker();
    parker->park(executor.deadline_in(kSleep));
  }
}

}  // namespace torchspan::collective
