#pragma once
#include <array>
#include <cstdint>
#include <string>

#include <torchspan/collective/backend.h>

namespace torchspan::collective {

/// A rank's call as one line of text: "all_reduce(Float [3, 4], sum)". Calls match if the lines are equal.
struct CallLine {
  std::string text;
};

/// `first_free`: the first dimension may differ.
CallLine line_of_tensor(const char* verb, const at::Tensor& tensor, const std::string& more,
                        bool first_free = false);

/// Lines are sent as rows of fixed length: longer ones are cut and distinguished by a hash of the whole.
inline constexpr std::size_t kLineBytes = 192;
using LineBytes = std::array<char, kLineBytes>;
LineBytes pack_line(const CallLine& line, std::uint64_t number);
std::string unpack_line(const LineBytes& bytes);

}  // namespace torchspan::collective
