#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

enum class SpanKind : std::uint8_t {
  kCall,
  kHandler,
  kAutograd,
  kOptimizer,
  kBucket,
  kPipeline,
  kWait,
  kUser
};

/// A timed operation on this worker. `id` links spans of different workers (a call id, a pass id).
struct Span {
  SpanKind kind = SpanKind::kUser;
  std::array<char, 47> name{};  ///< truncated, always zero-terminated
  TimePoint begin;
  TimePoint end;
  std::uint64_t id = 0;
};

/// The last `capacity` spans of one worker, for traces and reports. Thread-safe; overwrites the oldest.
class SpanRing {
 public:
  explicit SpanRing(Executor& executor, std::size_t capacity = 16384);

  void record(SpanKind kind, std::string_view name, TimePoint begin, std::uint64_t id = 0);
  /// Oldest first.
  std::vector<Span> snapshot() const;
  /// Number of spans ever recorded, including overwritten ones.
  std::uint64_t recorded() const;
  Executor& executor() const { return executor_; }

 private:
  Executor& executor_;
  const std::size_t capacity_;
  mutable Mutex mutex_;
  std::vector<Span> ring_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

/// Records a span from its construction to its destruction.
class SpanScope {
 public:
  SpanScope(SpanRing& ring, SpanKind kind, std::string_view name, std::uint64_t id = 0)
      : ring_(ring), kind_(kind), name_(name), begin_(ring.executor().now()), id_(id) {}
  ~SpanScope() { ring_.record(kind_, name_, begin_, id_); }
  SpanScope(const SpanScope&) = delete;

 private:
  SpanRing& ring_;
  SpanKind kind_;
  std::string name_;
  TimePoint begin_;
  std::uint64_t id_;
};

}  // namespace torchspan
