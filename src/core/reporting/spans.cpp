#include <algorithm>

#include <torchspan/detail/core/spans.h>

namespace torchspan {

SpanRing::SpanRing(Executor& executor, std::size_t capacity)
    : executor_(executor), capacity_(std::max<std::size_t>(capacity, 1)) {}

void SpanRing::record(SpanKind kind, std::string_view name, TimePoint begin, std::uint64_t id) {
  Span span;
  span.kind = kind;
  name.copy(span.name.data(), span.name.size() - 1);
  span.begin = begin;
  span.end = executor_.now();
  span.id = id;
  MutexLock lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(span);
  } else {
    ring_[next_ % capacity_] = span;
  }
  ++next_;
}

std::vector<Span> SpanRing::snapshot() const {
  MutexLock lock(mutex_);
  std::vector<Span> spans = ring_;
  if (next_ > capacity_) {
    std::rotate(spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(next_ % capacity_), spans.end());
  }
  return spans;
}

std::uint64_t SpanRing::recorded() const {
  MutexLock lock(mutex_);
  return next_;
}

}  // namespace torchspan
