#pragma once
#include <functional>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::collective {

/// Waits on the host until the device has reached `end`. Between looks at the device, calls `check(waited)`, whose
/// errors pass through. Throws what `late` returns after `timeout`.
void wait_on_host(const device::Mark& end, Executor& executor, Duration timeout,
                  const std::function<void(Duration)>& check, const std::function<Error()>& late);

}  // namespace torchspan::collective
