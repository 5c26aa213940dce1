#include "core/reporting/span_ring.h"

#include <algorithm>
#include <new>

namespace torchspan {
namespace {

constexpr std::uint64_t pack(std::uint64_t high, std::uint32_t low) { return high << 32 | low; }

// A reader that loads a word of span n + slots also sees written_ >= n + slots, because each word is stored
// with release order after the counter; so it discards the torn span n.
void store_word(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

std::uint64_t load_word(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

}  // namespace

SpanRing::SpanRing(std::size_t capacity, std::uint32_t thread)
    : slots_(capacity + 1),
      thread_(thread),
      words_(static_cast<std::uint64_t*>(std::calloc(slots_, kWords * sizeof(std::uint64_t)))) {
  if (!words_) throw std::bad_alloc();
}

void SpanRing::write(const StoredSpan& span) {
  const std::uint64_t number = written_.load(std::memory_order_relaxed);
  std::uint64_t* words = slot(number);
  store_word(words[0], static_cast<std::uint64_t>(span.begin));
  store_word(words[1], static_cast<std::uint64_t>(span.end));
  store_word(words[2], span.link.id);
  store_word(words[3], pack(span.name, static_cast<std::uint32_t>(span.kind) << 1 | (span.nested ? 1u : 0u)));
  store_word(words[4],
             pack(static_cast<std::uint32_t>(span.link.peer), static_cast<std::uint32_t>(span.link.part)));
  store_word(words[5], span.link.bytes);
  written_.store(number + 1, std::memory_order_release);
}

StoredSpan SpanRing::load(std::uint64_t number) const {
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

std::uint64_t SpanRing::read(std::uint64_t next, std::vector<StoredSpan>& spans, std::uint64_t& lost) const {
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

}  // namespace torchspan
