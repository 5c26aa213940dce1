#include "launch/display/lines.h"

#include <algorithm>
#include <utility>

namespace torchspan::launch {

void LineSplitter::hand_out(const Take& take) {
  const std::string line = std::exchange(line_, {});
  returned_ = false;
  take(line);
}

void LineSplitter::feed(std::string_view bytes, const Take& take) {
  while (!bytes.empty()) {
    if (bytes.front() == '\n') {
      hand_out(take);
      bytes.remove_prefix(1);
    } else if (bytes.front() == '\r') {
      returned_ = true;
      bytes.remove_prefix(1);
    } else {
      if (std::exchange(returned_, false)) line_.clear();
      const std::string_view text =
          bytes.substr(0, std::min(bytes.find_first_of("\r\n"), longest_ - line_.size()));
      line_ += text;
      bytes.remove_prefix(text.size());
      if (line_.size() >= longest_) hand_out(take);
    }
  }
}

void LineSplitter::finish(const Take& take) {
  if (!line_.empty()) hand_out(take);
}

std::string without_controls(std::string_view text) {
  const auto byte_at = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned>(static_cast<unsigned char>(text[i])) : 0u;
  };
  std::string clean;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_c1 = byte_at(i) == 0xc2 && byte_at(i + 1) >= 0x80 && byte_at(i + 1) <= 0x9f;
    clean += byte_at(i) < ' ' || byte_at(i) == 0x7f || is_c1 ? ' ' : text[i];
    if (is_c1) ++i;
  }
  return clean;
}

void LastLines::add(std::string_view line) {
  constexpr std::size_t kLongest = 500;
  if (line.empty()) return;
  lines_.emplace_back(line.substr(0, kLongest));
  if (lines_.size() > most_) lines_.pop_front();
}

}  // namespace torchspan::launch
