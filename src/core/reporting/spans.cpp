#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <pthread.h>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>

namespace torchspan {
namespace {

/// Numbers the names of spans. Thread-safe; a name that was looked up before takes no lock. Names are cut to
/// 120 bytes; after 4096 of them, all new ones share the last number.
class SpanNames {
 public:
  static constexpr std::size_t kMost = 4096;
  static constexpr std::size_t kLongest = 120;

  SpanNames() = default;

  ~SpanNames() {
    for (const Name* name : names_) delete name;
  }

  SpanNames(const SpanNames&) = delete;

  std::uint32_t number_of(std::string_view name) {
    name = name.substr(0, kLongest);
    std::atomic<const Name*>& recent = recent_[std::hash<std::string_view>()(name) % recent_.size()];
    const Name* known = recent.load(std::memory_order_acquire);
    if (known == nullptr || known->text != name) {
      known = &add(name);
      recent.store(known, std::memory_order_release);
    }
    return known->number;
  }

  std::vector<std::string> from(std::size_t first) const {
    MutexLock lock(mutex_);
    std::vector<std::string> names;
    for (std::size_t i = first; i < names_.size(); ++i) names.push_back(names_[i]->text);
    return names;
  }

 private:
  struct Name {
    std::string text;
    std::uint32_t number;
  };

  const Name& add(std::string_view name) {
    MutexLock lock(mutex_);
    if (const auto found = known_.find(name); found != known_.end()) return *found->second;
    if (names_.size() == kMost) return *names_.back();
    const bool last = names_.size() + 1 == kMost;
    auto added = std::make_unique<Name>(
        Name{last ? "(other names)" : std::string(name), static_cast<std::uint32_t>(names_.size())});
    names_.push_back(added.get());
    const Name& result = *added.release();
    if (!last) known_.emplace(result.text, &result);
    return result;
  }

  std::array<std::atomic<const Name*>, 1024> recent_{};  ///< by hash
  mutable Mutex mutex_;
  std::map<std::string, const Name*, std::less<>> known_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<const Name*> names_ TORCHSPAN_GUARDED_BY(mutex_);
};

constexpr std::uint64_t pack(std::uint64_t high, std::uint32_t low) { return high << 32 | low; }

// A reader that loads a word of span n + slots also sees written_ >= n + slots, because each word is stored
// with release order after the counter; so it discards the torn span n.
void store_word(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

std::uint64_t load_word(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

/// The last spans of one thread. One thread writes; any thread reads without delaying it. Unused memory is
/// not touched.
class SpanRing {
 public:
  SpanRing(std::size_t capacity, std::uint32_t thread)
      : slots_(capacity + 1),
        thread_(thread),
        words_(static_cast<std::uint64_t*>(std::calloc(slots_, kWords * sizeof(std::uint64_t)))) {
    if (!words_) throw std::bad_alloc();
  }

  /// Stores a span; by the writing thread only.
  void write(const StoredSpan& span) {
    const std::uint64_t number = written_.load(std::memory_order_relaxed);
    std::uint64_t* words = slot(number);
    store_word(words[0], static_cast<std::uint64_t>(span.begin));
    store_word(words[1], static_cast<std::uint64_t>(span.end));
    store_word(words[2], span.link.id);
    store_word(words[3],
               pack(span.name, static_cast<std::uint32_t>(span.kind) << 1 | (span.nested ? 1u : 0u)));
    store_word(words[4],
               pack(static_cast<std::uint32_t>(span.link.peer), static_cast<std::uint32_t>(span.link.part)));
    store_word(words[5], span.link.bytes);
    written_.store(number + 1, std::memory_order_release);
  }

  /// Appends the spans from number `next` on and returns the number after the last. Adds those that were
  /// overwritten before they could be read to `lost`.
  std::uint64_t read(std::uint64_t next, std::vector<StoredSpan>& spans, std::uint64_t& lost) const {
    const std::uint64_t end = written();
    const std::uint64_t capacity = slots_ - 1;
    const std::uint64_t first = std::max(next, end > capacity ? end - capacity : 0);
    const std::size_t size = spans.size();
    for (std::uint64_t number = first; number < end; ++number) spans.push_back(load(number));
    // While these were copied, the writer may have begun span `now`, which replaces span now - slots_.
    const std::uint64_t now = written();
    const std::uint64_t whole = std::clamp(now > capacity ? now - capacity : 0, first, end);
    const auto begin = spans.begin() + static_cast<std::ptrdiff_t>(size);
    spans.erase(begin, begin + static_cast<std::ptrdiff_t>(whole - first));
    lost += whole - next;
    return end;
  }

  std::uint64_t written() const { return written_.load(std::memory_order_acquire); }

 private:
  static constexpr std::size_t kWords = 6;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::uint64_t* slot(std::uint64_t number) const { return words_.get() + number % slots_ * kWords; }

  StoredSpan load(std::uint64_t number) const {
    std::uint64_t* words = slot(number);
    StoredSpan span;
    span.begin = static_cast<std::int64_t>(load_word(words[0]));
    span.end = static_cast<std::int64_t>(load_word(words[1]));
    span.link.id = load_word(words[2]);
    const std::uint64_t name = load_word(words[3]);
    span.name = static_cast<std::uint32_t>(name >> 32);
    span.kind = static_cast<SpanKind>(name >> 1 & 0xff);
    span.nested = (name & 1) != 0;
    const std::uint64_t peers = load_word(words[4]);
    span.link.peer = static_cast<std::int32_t>(peers >> 32);
    span.link.part = static_cast<std::int32_t>(peers & 0xffffffff);
    span.link.bytes = load_word(words[5]);
    span.thread = thread_;
    return span;
  }

  const std::size_t slots_;  ///< one more than the capacity: the one that may be in the middle of a write
  const std::uint32_t thread_;
  std::unique_ptr<std::uint64_t, Free> words_;
  std::atomic<std::uint64_t> written_{0};
};

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
