#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// The last spans of one thread. One thread writes; any thread reads without delaying it. Unused memory is
/// not touched.
class SpanRing {
 public:
  SpanRing(std::size_t capacity, std::uint32_t thread);

  /// Stores a span; by the writing thread only.
  void write(const StoredSpan& span);
  /// Appends the spans from number `next` on and returns the number after the last. Adds those that were
  /// overwritten before they could be read to `lost`.
  std::uint64_t read(std::uint64_t next, std::vector<StoredSpan>& spans, std::uint64_t& lost) const;
  std::uint64_t written() const { return written_.load(std::memory_order_acquire); }

 private:
  static constexpr std::size_t kWords = 6;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::uint64_t* slot(std::uint64_t number) const { return words_.get() + number % slots_ * kWords; }
  StoredSpan load(std::uint64_t number) const;

  const std::size_t slots_;  ///< one more than the capacity: the one that may be in the middle of a write
  const std::uint32_t thread_;
  std::unique_ptr<std::uint64_t, Free> words_;
  std::atomic<std::uint64_t> written_{0};
};

}  // namespace torchspan
