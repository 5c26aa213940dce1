#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include <torchspan/detail/core/executor.h>

namespace torchspan::launch {

struct DisplayOptions {
  int output = 1;  ///< takes the workers' standard output
  int errors = 2;  ///< takes their standard error, our own words and the live line
  bool output_terminal = false;
  bool errors_terminal = false;  ///< then the live line is drawn at the bottom
  bool colours = false;
  std::size_t width = 80;  ///< where the terminal does not say

  /// From the kind of descriptors 1 and 2, TERM and NO_COLOR.
  static DisplayOptions from_process();
};

/// "[worker1] " in the colour of its rank.
std::string prefix_of(const std::string& name, int rank, bool colours);

/// The exit code of a command that did its work and could not write all of its output.
inline constexpr int kLostOutput = 1;

/// Writes whole lines, and keeps one live line at the bottom of a terminal. One thread at a time.
class Display {
 public:
  Display(Executor& executor, DisplayOptions options) : executor_(executor), options_(options) {}

  void print_output(std::string_view prefix, std::string_view line);
  void print_error(std::string_view prefix, std::string_view line);
  /// Text of our own, ending in a newline.
  void say(std::string_view text);
  /// Replaces the live line; an empty one removes it. Nothing where there is no terminal.
  void set_live(std::string line);
  bool is_live() const { return options_.errors_terminal; }
  /// Characters in a line of the terminal as it is now.
  std::size_t width() const;
  /// Whether nobody reads our output any more.
  bool broken() const { return broken_; }
  /// "3 lines could not be written: No space left on device"; empty when all were.
  std::string losses() const;

 private:
  void print(int descriptor, bool terminal, std::string text);
  /// False when the system refused it; its reason is in errno.
  bool write_all(int descriptor, std::string_view text);
  void note_loss(int descriptor, int reason);
  void wait_writable(int descriptor);

  Executor& executor_;
  const DisplayOptions options_;
  std::string live_;
  bool broken_ = false;
  std::size_t lost_ = 0;  ///< lines
  int loss_reason_ = 0;   ///< of the first of them, as errno
};

}  // namespace torchspan::launch
