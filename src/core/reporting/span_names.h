#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/mutex.h>

namespace torchspan {

/// Numbers the names of spans. Thread-safe; a name that was looked up before takes no lock. Names are cut to
/// 120 bytes; after 4096 of them, all new ones share the last number.
class SpanNames {
 public:
  static constexpr std::size_t kMost = 4096;
  static constexpr std::size_t kLongest = 120;

  SpanNames() = default;
  ~SpanNames();
  SpanNames(const SpanNames&) = delete;

  std::uint32_t number_of(std::string_view name);
  std::vector<std::string> from(std::size_t first) const;

 private:
  struct Name {
    std::string text;
    std::uint32_t number;
  };
  const Name& add(std::string_view name);

  std::array<std::atomic<const Name*>, 1024> recent_{};  ///< by hash
  mutable Mutex mutex_;
  std::map<std::string, const Name*, std::less<>> known_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<const Name*> names_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan
