#include <algorithm>

#include <torchspan/detail/core/scalars.h>

namespace torchspan {

void ScalarLog::add(std::string_view tag, double value, std::optional<std::int64_t> step, TimePoint now) {
  MutexLock lock(mutex_);
  auto next = steps_.find(tag);
  if (next == steps_.end()) next = steps_.emplace(std::string(tag), 0).first;
  const std::int64_t number = step.value_or(next->second);
  next->second = number + 1;
  scalars_.push_back({std::string(tag), number, value, now});
  if (scalars_.size() <= kMost) return;
  scalars_.pop_front();
  ++dropped_;
}

std::vector<Scalar> ScalarLog::read(std::uint64_t& next, std::uint64_t& lost) const {
  MutexLock lock(mutex_);
  const std::uint64_t first = std::max(next, dropped_);
  lost += first - next;
  next = dropped_ + scalars_.size();
  return {scalars_.begin() + static_cast<std::ptrdiff_t>(first - dropped_), scalars_.end()};
}

}  // namespace torchspan
