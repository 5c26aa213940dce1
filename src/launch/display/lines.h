#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace torchspan::launch {

/// Splits a byte stream into lines. A carriage return restarts the line, as on a terminal; a line of more
/// than `longest` bytes is returned in pieces.
class LineSplitter {
 public:
  using Take = std::function<void(std::string_view line)>;
  explicit LineSplitter(std::size_t longest = std::size_t{1} << 20) : longest_(longest) {}

  /// Calls `take` for every complete line, without its newline.
  void feed(std::string_view bytes, const Take& take);
  /// Marks the end of the stream: passes on the last line if it has no newline.
  void finish(const Take& take);

 private:
  void hand_out(const Take& take);

  const std::size_t longest_;
  std::string line_;
  bool returned_ = false;  ///< the last character was a carriage return
};

/// Returns the text, which is UTF-8, with a space for each control character (C0, DEL and C1): names come from programs, and
/// would control the terminal.
std::string without_controls(std::string_view text);

/// Keeps the last lines of a stream: what a process wrote before it ended.
class LastLines {
 public:
  explicit LastLines(std::size_t most = 5) : most_(most) {}
  void add(std::string_view line);
  std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

 private:
  const std::size_t most_;
  std::deque<std::string> lines_;
};

}  // namespace torchspan::launch
