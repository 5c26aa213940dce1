#pragma once
#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/buffer.h>

#include "tests/support/errors.h"
#include "wire/api/tensors.h"

namespace torchspan::wire {

using torchspan::testing::kind_of;

/// Does what a transport does: every segment arrives in a separate buffer.
inline std::vector<Buffer> deliver(std::span<const Segment> segments) {
  std::vector<Buffer> buffers;
  for (const Segment& segment : segments) {
    buffers.push_back(allocate_buffer(segment.size));
    std::memcpy(buffers.back().data, segment.data, segment.size);
  }
  return buffers;
}

inline std::vector<at::Tensor> round_trip(std::span<const at::Tensor> tensors) {
  const PackedTensors packed = pack(tensors);
  std::vector<Buffer> buffers = deliver(packed.segments);
  return unpack(packed.metadata, buffers);
}

inline at::Tensor round_trip(const at::Tensor& tensor) { return round_trip(std::span(&tensor, 1)).at(0); }

/// Runs `decode` on every shortened form of `valid`, and on `rounds` randomly damaged ones. It must return or
/// throw Error; anything else ends the test. Returns how many damaged forms were refused.
template <class Decode>
int damage(const Bytes& valid, std::uint64_t seed, int rounds, Decode decode) {
  SCOPED_TRACE("damage seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int refused = 0;
  const auto attempt = [&](const Bytes& bytes) {
    try {
      decode(bytes);
    } catch (const Error&) {
      ++refused;
    }
  };
  for (std::size_t size = 0; size < valid.size(); ++size) {
    attempt(Bytes(valid.begin(), valid.begin() + static_cast<std::ptrdiff_t>(size)));
  }
  constexpr std::byte kTelling[] = {std::byte{0}, std::byte{1}, std::byte{0x7F}, std::byte{0x80},
                                    std::byte{0xFF}};
  for (int round = 0; round < rounds && !valid.empty(); ++round) {
    Bytes bytes = valid;
    for (std::size_t hits = 1 + random() % 4; hits > 0; --hits) {
      std::byte& target = bytes[random() % bytes.size()];
      target =
          random() % 2 == 0 ? kTelling[random() % std::size(kTelling)] : static_cast<std::byte>(random());
    }
    if (random() % 8 == 0) bytes.insert(bytes.end(), 1 + random() % 16, static_cast<std::byte>(random()));
    attempt(bytes);
  }
  return refused;
}

}  // namespace torchspan::wire
