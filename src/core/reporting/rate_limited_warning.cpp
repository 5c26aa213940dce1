#include "core/api/rate_limited_warning.h"

#include <fmt/format.h>
#include <utility>

namespace torchspan {

void RateLimitedWarning::write(const std::string& text) {
  std::uint64_t kept_back;
  {
    MutexLock lock(mutex_);
    const TimePoint now = executor_.now();
    if (now < next_) {
      ++kept_back_;
      return;
    }
    next_ = now + pause_;
    kept_back = std::exchange(kept_back_, 0);
  }
  log_.warning(kept_back == 0 ? text
                              : fmt::format("{} ({} more of this kind since the last)", text, kept_back));
}

}  // namespace torchspan
