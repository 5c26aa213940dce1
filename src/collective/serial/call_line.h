#pragma once
#include <array>
#include <cstdint>
#include <string>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// A call of a rank as one line of text: "all_reduce(Float [3, 4], sum)". Calls agree if their lines are
/// equal.
struct CallLine {
  std::string text;
};

/// `first_free`: the first dimension may differ.
CallLine line_of_tensor(const char* verb, const at::Tensor& tensor, const std::string& more,
                        bool first_free = false);

/// Lines are sent in fixed size: longer ones are truncated, and contain a checksum of the whole line.
inline constexpr std::size_t kLineBytes = 192;
using LineBytes = std::array<char, kLineBytes>;
LineBytes pack_line(const CallLine& line, std::uint64_t number);
std::string unpack_line(const LineBytes& bytes);

}  // namespace torchspan::collective
