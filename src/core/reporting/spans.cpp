#include <algorithm>
#include <array>
#include <pthread.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>

#include "core/reporting/span_names.h"
#include "core/reporting/span_ring.h"

namespace torchspan {
namespace {

std::uint64_t current_thread() { return static_cast<std::uint64_t>(pthread_self()); }

std::int64_t nanoseconds(TimePoint time) { return time.time_since_epoch().count(); }

std::string name_of_current_thread() {
  std::array<char, 16> name{};
  return pthread_getname_np(pthread_self(), name.data(), name.size()) == 0 ? name.data() : "";
}

}  // namespace

/// The rings of all threads, found by the thread's identity. A thread that got the identity of one that ended
/// continues its ring.
class SpanRecorder::State {
 public:
  explicit State(std::size_t capacity) : capacity_(capacity) {}

  /// Returns the ring of the calling thread; null if there are too many threads.
  SpanRing* ring() {
    const std::uint64_t thread = current_thread();
    for (std::size_t i = first_slot(thread), tried = 0; tried < kSlots; ++tried, i = (i + 1) % kSlots) {
      const std::uint64_t owner = slots_[i].thread.load(std::memory_order_acquire);
      if (owner == thread) return slots_[i].ring;
      if (owner == 0) return add(thread, i);
    }
    return nullptr;
  }

  void write(const StoredSpan& span) {
    if (SpanRing* place = ring()) {
      place->write(span);
    } else {
      homeless_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  std::uint64_t not_stored() const { return homeless_.load(std::memory_order_relaxed); }
  std::vector<SpanRing*> rings() const {
    MutexLock lock(mutex_);
    std::vector<SpanRing*> all;
    for (const auto& ring : rings_) all.push_back(ring.get());
    return all;
  }
  std::vector<std::string> threads_from(std::size_t first) const {
    MutexLock lock(mutex_);
    first = std::min(first, threads_.size());
    return {threads_.begin() + static_cast<std::ptrdiff_t>(first), threads_.end()};
  }
  void set_capacity(std::size_t capacity) { capacity_.store(capacity, std::memory_order_relaxed); }

  SpanNames names;
  mutable Mutex open_mutex;
  SpanScope* open TORCHSPAN_GUARDED_BY(open_mutex) = nullptr;  ///< newest first

 private:
  static constexpr std::size_t kSlots = 128;
  static constexpr std::size_t kMostRings = 120;  // so that a search always ends at a free slot
  struct Slot {
    std::atomic<std::uint64_t> thread{0};
    SpanRing* ring = nullptr;  ///< set before `thread`
  };

  static std::size_t first_slot(std::uint64_t thread) {
    return static_cast<std::size_t>((thread * 0x9e3779b97f4a7c15ull) >> 57) % kSlots;
  }

  SpanRing* add(std::uint64_t thread, std::size_t from) {
    MutexLock lock(mutex_);
    if (rings_.size() == kMostRings) return nullptr;
    rings_.push_back(std::make_unique<SpanRing>(capacity_.load(std::memory_order_relaxed),
                                                static_cast<std::uint32_t>(rings_.size())));
    threads_.push_back(name_of_current_thread());
    std::size_t i = from;
    while (slots_[i].thread.load(std::memory_order_relaxed) != 0) i = (i + 1) % kSlots;
    slots_[i].ring = rings_.back().get();
    slots_[i].thread.store(thread, std::memory_order_release);
    return slots_[i].ring;
  }

  std::atomic<std::size_t> capacity_;
  std::atomic<std::uint64_t> homeless_{0};
  std::array<Slot, kSlots> slots_;
  mutable Mutex mutex_;
  std::vector<std::unique_ptr<SpanRing>> rings_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::string> threads_ TORCHSPAN_GUARDED_BY(mutex_);
};

SpanRecorder::SpanRecorder(Executor& executor, std::size_t capacity)
    : executor_(executor), state_(std::make_unique<State>(std::max<std::size_t>(capacity, 1))) {}
SpanRecorder::~SpanRecorder() = default;

void SpanRecorder::set_traced(std::size_t capacity) {
  state_->set_capacity(std::max<std::size_t>(capacity, 1));
  traced_.store(true, std::memory_order_relaxed);
}

void SpanRecorder::record(SpanKind kind, std::string_view name, TimePoint begin, const SpanLink& link) {
  if (!executor_.process().is_current()) return;
  StoredSpan span;
  span.begin = nanoseconds(begin);
  span.end = nanoseconds(executor_.now());
  span.link = link;
  span.name = state_->names.number_of(name);
  span.kind = kind;
  state_->write(span);
}

void SpanRecorder::read(Cursor& cursor, std::vector<StoredSpan>& spans) const {
  const std::vector<SpanRing*> rings = state_->rings();
  cursor.next.resize(rings.size());
  const std::uint64_t not_stored = state_->not_stored();
  for (std::size_t i = 0; i < rings.size(); ++i) {
    cursor.next[i] = rings[i]->read(cursor.next[i], spans, cursor.lost);
  }
  cursor.lost += not_stored - cursor.not_stored;
  cursor.not_stored = not_stored;
}

std::vector<std::string> SpanRecorder::names_from(std::size_t first) const {
  return state_->names.from(first);
}

std::vector<std::string> SpanRecorder::threads_from(std::size_t first) const {
  return state_->threads_from(first);
}

std::uint64_t SpanRecorder::recorded() const {
  std::uint64_t total = state_->not_stored();
  for (const SpanRing* ring : state_->rings()) total += ring->written();
  return total;
}

std::vector<SpanRecord> SpanRecorder::snapshot() const {
  Cursor cursor;
  std::vector<StoredSpan> stored;
  read(cursor, stored);
  std::stable_sort(stored.begin(), stored.end(),
                   [](const StoredSpan& a, const StoredSpan& b) { return a.end < b.end; });
  const std::vector<std::string> names = names_from(0);
  std::vector<SpanRecord> records;
  records.reserve(stored.size());
  for (const StoredSpan& span : stored) {
    records.push_back({span.kind, names.at(span.name), TimePoint(Duration(span.begin)),
                       TimePoint(Duration(span.end)), span.link.id, span.link});
  }
  return records;
}

std::vector<OpenOperation> SpanRecorder::open() const {
  std::vector<StoredSpan> stored;
  {
    MutexLock lock(state_->open_mutex);
    for (const SpanScope* scope = state_->open; scope != nullptr; scope = scope->next_) {
      stored.push_back(scope->span_);
    }
  }
  const std::vector<std::string> names = names_from(0);
  std::vector<OpenOperation> operations;
  for (auto span = stored.rbegin(); span != stored.rend(); ++span) {
    operations.push_back({span->kind, names.at(span->name), TimePoint(Duration(span->begin)), span->link});
  }
  return operations;
}

SpanScope::SpanScope(SpanRecorder& recorder, SpanKind kind, std::string_view name, const SpanLink& link)
    : recorder_(recorder), began_on_(current_thread()) {
  if (!recorder.executor().process().is_current()) return;
  span_.begin = nanoseconds(recorder.executor().now());
  span_.link = link;
  span_.kind = kind;
  span_.name = recorder.state_->names.number_of(name);
  SpanRecorder::State& state = *recorder_.state_;
  MutexLock lock(state.open_mutex);
  next_ = state.open;
  if (next_ != nullptr) next_->previous_ = this;
  state.open = this;
}

SpanScope::~SpanScope() {
  if (!recorder_.executor().process().is_current()) return;
  SpanRecorder::State& state = *recorder_.state_;
  {
    MutexLock lock(state.open_mutex);
    (previous_ != nullptr ? previous_->next_ : state.open) = next_;
    if (next_ != nullptr) next_->previous_ = previous_;
  }
  span_.end = nanoseconds(recorder_.executor().now());
  span_.nested = began_on_ == current_thread();
  state.write(span_);
}

}  // namespace torchspan
