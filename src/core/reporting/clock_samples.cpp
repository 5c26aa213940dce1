#include <algorithm>

#include <torchspan/detail/core/clock_samples.h>

namespace torchspan {

void ClockSamples::add(const ClockSample& sample) {
  MutexLock lock(mutex_);
  samples_.push_back(sample);
  if (samples_.size() <= kMost) return;
  constexpr std::size_t kDrop = kMost / 2;
  samples_.erase(samples_.begin(), samples_.begin() + kDrop);
  dropped_ += kDrop;
}

std::vector<ClockSample> ClockSamples::read(std::uint64_t& next) const {
  MutexLock lock(mutex_);
  const std::uint64_t first = std::max(next, dropped_);
  next = dropped_ + samples_.size();
  return {samples_.begin() + static_cast<std::ptrdiff_t>(first - dropped_), samples_.end()};
}

}  // namespace torchspan
