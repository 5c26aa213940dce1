#pragma once
#include <functional>

#include <c10/core/Stream.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

namespace torchspan::collective {

/// Waits on the host until the device has done what was enqueued on `stream`. Between looks at the device, calls
/// `check(waited)`, whose errors pass through. Throws what `late` returns after `timeout`.
void wait_on_host(const c10::Stream& stream, Executor& executor, Duration timeout,
                  const std::function<void(Duration)>& check, const std::function<Error()>& late);

}  // namespace torchspan::collective
