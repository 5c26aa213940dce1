#pragma once
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::launch {

struct DisplayOptions {
  int output = 1;  ///< receives the workers' standard output
  int errors = 2;  ///< receives their standard error, the launcher's own messages and the live block
  bool output_terminal = false;
  bool errors_terminal = false;  ///< if set, the live block is drawn at the bottom
  bool colours = false;
  std::size_t width = 80;   ///< if the terminal does not report it
  std::size_t height = 24;  ///< the same
  bool rewraps = true;      ///< the terminal wraps lines anew when it becomes narrower, as most do

  /// From the type of descriptors 1 and 2, TERM, NO_COLOR and what the terminal says of itself.
  static DisplayOptions from_process();
};

/// Returns "[worker1] " in the color of its rank.
std::string prefix_of(const std::string& name, int rank, bool colours);

/// The exit code of a command that did its work but could not write all of its output.
inline constexpr int kLostOutput = 1;

/// Writes whole lines, and keeps a live block of lines at the bottom of a terminal, below all output. For one thread
/// at a time.
class Display {
 public:
  Display(Executor& executor, DisplayOptions options) : executor_(executor), options_(options) {}

  void print_output(std::string_view prefix, std::string_view line);
  /// Shortens an error of a call that another worker, with another prefix, has just printed: its worker and its time
  /// may differ.
  void print_error(std::string_view prefix, std::string_view line);
  /// Writes text of the launcher itself, ending in a newline.
  void say(std::string_view text);
  /// Replaces the live block; none removes it. Cuts lines to the terminal's width, and lines that do not fit into its
  /// height. Lines may contain sequences that set colors. Does nothing without a terminal.
  void set_live(std::vector<std::string> lines);
  bool is_live() const { return options_.errors_terminal; }
  bool has_colours() const { return options_.colours; }
  /// The current width of the terminal in characters.
  std::size_t width() const { return size().columns; }
  std::size_t height() const { return size().rows; }
  /// Whether the reader of the output has closed it.
  bool broken() const { return broken_; }
  /// A log file ends early, with the text for losses().
  void note_lost_log(const std::string& text);
  /// Returns "3 lines could not be written: No space left on device"; empty if all were written.
  std::string losses() const;

 private:
  struct Size {
    std::size_t columns, rows;
  };

  Size size() const;
  /// The sequence that moves the cursor to the beginning of the block.
  std::string to_block() const;
  /// The block, from its beginning, with the cursor at the beginning of its last line.
  std::string draw_block();
  void print(int descriptor, bool terminal, std::string text);
  /// The line, shortened if it repeats an error of another worker.
  std::string without_repetition(std::string_view prefix, std::string_view line);
  /// Returns false if the system refused the write; errno holds the reason.
  bool write_all(int descriptor, std::string_view text);
  void note_loss(int descriptor, int reason);
  void wait_writable(int descriptor);

  Executor& executor_;
  const DisplayOptions options_;
  struct PrintedError {
    std::string prefix, text;
  };
  std::deque<PrintedError> printed_;  ///< the last ones
  std::vector<std::string> live_;
  std::size_t drawn_width_ = 0;  ///< of the terminal when the block was drawn
  bool broken_ = false;
  std::size_t lost_ = 0;  ///< lines
  int loss_reason_ = 0;   ///< of the first of them, as errno
  std::string lost_log_;  ///< the first log that ended early
};

}  // namespace torchspan::launch
