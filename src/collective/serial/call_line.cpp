#include "collective/serial/call_line.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include "collective/tensors.h"
#include "core/api/hashes.h"

namespace torchspan::collective {
CallLine line_of_tensor(const char* verb, const at::Tensor& tensor, const std::string& more,
                        bool first_free) {
  std::vector<std::string> sizes;
  for (const std::int64_t size : tensor.sizes()) sizes.push_back(std::to_string(size));
  if (first_free && !sizes.empty()) sizes[0] = "*";
  return {fmt::format("{}({}{} [{}]{})", verb, tensor.is_sparse() ? "sparse " : "",
                      name_of_dtype(static_cast<std::int8_t>(tensor.scalar_type())), fmt::join(sizes, ", "),
                      more)};
}

LineBytes pack_line(const CallLine& line, std::uint64_t number) {
  const std::string head = fmt::format("{} {:016x} ", number, fnv1a(line.text));
  LineBytes bytes{};
  const std::string text = head + line.text;
  std::copy_n(text.begin(), std::min(text.size(), bytes.size() - 1), bytes.begin());
  return bytes;
}

std::string unpack_line(const LineBytes& bytes) {
  const std::string text(bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0'));
  const std::size_t number = text.find(' ');
  const std::size_t sum = number == std::string::npos ? number : text.find(' ', number + 1);
  return sum == std::string::npos ? text : text.substr(sum + 1);
}

}  // namespace torchspan::collective
