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

std::string without_controls(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return text;
}

void LastLines::add(std::string_view line) {
  constexpr std::size_t kLongest = 500;
  if (line.empty()) return;
  lines_.emplace_back(line.substr(0, kLongest));
  if (lines_.size() > most_) lines_.pop_front();
}

}  // namespace torchspan::launch
