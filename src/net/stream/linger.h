#pragma once
#include <cstddef>

#include <torchspan/core/time.h>

namespace torchspan::net {

/// How long a closed channel waits for its peer to read what is queued, and to acknowledge the goodbye behind it.
class Linger {
 public:
  explicit Linger(Duration limit) : limit_(limit) {}
  /// Returns when a peer must have read something of `unsent` bytes.
  TimePoint begin(TimePoint now, std::size_t unsent) {
    unsent_ = unsent;
    return now + limit_;
  }
  bool has_moved(std::size_t unsent) const { return unsent < unsent_; }

 private:
  const Duration limit_;
  std::size_t unsent_ = 0;
};

}  // namespace torchspan::net
