#include "net/stream/driver_context.h"

namespace torchspan::net {

void Timers::set(std::uint64_t token, std::optional<TimePoint> when) {
  if (const auto found = times_.find(token); found != times_.end()) {
    queue_.erase({found->second, token});
    times_.erase(found);
  }
  if (!when) return;
  times_.emplace(token, *when);
  if (*when != TimePoint::max()) queue_.emplace(*when, token);
}

std::optional<TimePoint> Timers::of(std::uint64_t token) const {
  const auto found = times_.find(token);
  return found == times_.end() ? std::nullopt : std::optional(found->second);
}

Deadline Timers::next() const { return queue_.empty() ? Deadline::never() : Deadline(queue_.begin()->first); }

std::optional<std::uint64_t> Timers::take_due(TimePoint now) {
  if (queue_.empty() || queue_.begin()->first > now) return std::nullopt;
  const std::uint64_t token = queue_.begin()->second;
  set(token, std::nullopt);
  return token;
}

}  // namespace torchspan::net
