#pragma once
#include <cstdint>
#include <memory>

#include <torchspan/core/bytes.h>

namespace torchspan::checkpoint {

/// XXH3 of 64 bits. It detects damage; it does not authenticate.
std::uint64_t checksum_of(BytesView bytes);

/// The same over consecutive parts.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void add(BytesView part);
  /// The checksum of all parts so far; starts over.
  std::uint64_t finish();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchspan::checkpoint
