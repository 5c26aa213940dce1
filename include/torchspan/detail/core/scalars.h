#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>

namespace torchspan {

/// One point of a curve, such as a loss.
struct Scalar {
  std::string tag;
  std::int64_t step = 0;
  double value = 0;
  TimePoint at;
};

/// The last 65,536 scalars that a program logged. Thread-safe.
class ScalarLog {
 public:
  /// Without `step`, the values of a tag are numbered from 0.
  void add(std::string_view tag, double value, std::optional<std::int64_t> step, TimePoint now);
  /// Returns the scalars with numbers from `next` on, which advances. Adds those that were dropped before
  /// they could be read to `lost`.
  std::vector<Scalar> read(std::uint64_t& next, std::uint64_t& lost) const;

 private:
  static constexpr std::size_t kMost = 65536;

  mutable Mutex mutex_;
  std::deque<Scalar> scalars_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t dropped_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::int64_t, std::less<>> steps_ TORCHSPAN_GUARDED_BY(mutex_);  ///< next, by tag
};

}  // namespace torchspan
