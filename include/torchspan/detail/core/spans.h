#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan {

/// The numbers are part of the trace format (docs/trace_format.md) and never change.
enum class SpanKind : std::uint8_t {
  kCall,
  kHandler,
  kAutograd,
  kOptimizer,
  kBucket,
  kPipeline,
  kWait,
  kUser,
  kCollective,
  kCheckpoint
};

/// What relates a span to other spans, of this worker and of others. Unset fields are -1 or 0.
struct SpanLink {
  std::uint64_t id = 0;     ///< call id, pass id, reduction, step or sequence number
  std::int32_t peer = -1;   ///< rank: callee of a call, caller of a handler
  std::int32_t part = -1;   ///< bucket or micro-batch
  std::uint64_t bytes = 0;  ///< payload
};

/// A timed operation as it is stored: names are numbers, times are nanoseconds of the executor's clock.
struct StoredSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  SpanLink link;
  std::uint32_t name = 0;
  std::uint32_t thread = 0;  ///< in the order in which threads recorded their first span
  SpanKind kind = SpanKind::kUser;
  bool nested = false;  ///< began and ended on `thread`, as a scope does
};

/// A timed operation of this worker.
struct SpanRecord {
  SpanKind kind = SpanKind::kUser;
  std::string name;
  TimePoint begin;
  TimePoint end;
  std::uint64_t id = 0;  ///< equals link.id
  SpanLink link = {};
};

/// An operation that has begun and not ended.
struct OpenOperation {
  SpanKind kind = SpanKind::kUser;
  std::string name;
  TimePoint begin;
  SpanLink link = {};
};

/// Records the operations of one worker: the last `capacity` spans of each thread, without locks, in about
/// 60 ns each. Thread-safe. Stores at most 120 threads and 4096 names; spans beyond that are counted as lost.
class SpanRecorder {
 public:
  explicit SpanRecorder(Executor& executor, std::size_t capacity = 4096);
  ~SpanRecorder();
  SpanRecorder(const SpanRecorder&) = delete;

  /// Records an operation that ends now.
  void record(SpanKind kind, std::string_view name, TimePoint begin, const SpanLink& link);
  void record(SpanKind kind, std::string_view name, TimePoint begin, std::uint64_t id = 0) {
    record(kind, name, begin, SpanLink{.id = id});
  }
  /// Returns the stored spans in the order in which they ended.
  std::vector<SpanRecord> snapshot() const;
  /// Returns what SpanScopes have begun and not ended, oldest first.
  std::vector<OpenOperation> open() const;
  /// Number of spans ever recorded, including overwritten and lost ones.
  std::uint64_t recorded() const;
  Executor& executor() const { return executor_; }

  /// Whether every span is written to a file; components then also record spans that they skip otherwise.
  bool is_traced() const { return traced_.load(std::memory_order_relaxed); }
  /// Sets is_traced(), and gives room for more spans to threads that record their first span from now on.
  void set_traced(std::size_t capacity);

  /// Position of a reader; one reader uses it.
  struct Cursor {
    std::vector<std::uint64_t> next;  ///< by thread
    std::uint64_t not_stored = 0;     ///< spans of threads without a ring
    std::uint64_t lost = 0;           ///< these, and spans that were overwritten before they were read
  };
  /// Appends the spans recorded since the last call with `cursor`, thread by thread.
  void read(Cursor& cursor, std::vector<StoredSpan>& spans) const;
  /// Returns the names with numbers from `first` on.
  std::vector<std::string> names_from(std::size_t first) const;
  /// Returns the system's names of the threads with numbers from `first` on.
  std::vector<std::string> threads_from(std::size_t first) const;

 private:
  friend class SpanScope;
  class State;

  Executor& executor_;
  std::atomic<bool> traced_{false};
  const std::unique_ptr<State> state_;
};

/// Records a span from its construction to its destruction, which may happen on another thread. Until then
/// the operation is listed by SpanRecorder::open().
class SpanScope {
 public:
  SpanScope(SpanRecorder& recorder, SpanKind kind, std::string_view name, const SpanLink& link);
  SpanScope(SpanRecorder& recorder, SpanKind kind, std::string_view name, std::uint64_t id = 0)
      : SpanScope(recorder, kind, name, SpanLink{.id = id}) {}
  ~SpanScope();
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  friend class SpanRecorder;

  SpanRecorder& recorder_;
  StoredSpan span_;
  std::uint64_t began_on_;  ///< thread
  SpanScope* previous_ = nullptr;
  SpanScope* next_ = nullptr;
};

}  // namespace torchspan
