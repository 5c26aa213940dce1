#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/detail/core/executor.h>

namespace torchspan {

/// How far a program is. Zero or empty fields are not shown.
struct ProgressReport {
  std::int64_t epoch = 0;  ///< counted from 1
  std::int64_t epochs = 0;
  std::int64_t step = 0;  ///< finished steps of this epoch
  std::int64_t steps = 0;
  std::optional<double> loss;
  double rate = 0;  ///< units per second
  std::string unit = "samples";
  std::string text;                    ///< anything else, at the end of the line
  std::optional<double> seconds_left;  ///< filled in by Progress
};

/// The share of the whole work that is done, 0 to 1; nothing when the totals are not known.
std::optional<double> fraction_done(const ProgressReport& report);

/// The line "torchspan-progress 1 epoch=2/5 step=17/469 loss=0.512 rate=5120 left=63 unit=images text=…" that
/// a program writes to the descriptor TORCHSPAN_PROGRESS_FD. Fields that say nothing are left out; in values
/// '%', blanks and control characters are written %XX. Readers skip keys they do not know.
std::string encode_progress(const ProgressReport& report);
/// Reads such a line, with or without its newline; nothing when it is none.
std::optional<ProgressReport> decode_progress(std::string_view line);

/// "epoch 2/5  step 17/469  loss 0.5120  5,120 images/s  1m03s left  text", cut to `width` characters.
std::string format_progress(const ProgressReport& report, std::size_t width = 1000);
/// "7s", "1m03s", "2h05m".
std::string format_seconds(double seconds);

struct ProgressOptions {
  int launcher_descriptor = -1;  ///< where the launcher listens, or -1
  int descriptor = 2;            ///< where this process draws or prints when no launcher listens
  bool terminal = false;         ///< `descriptor` is a terminal: redraw one line
  std::size_t width = 80;        ///< of the terminal
  Duration draw_every = std::chrono::milliseconds(100);
  Duration print_every = std::chrono::seconds(10);

  /// From TORCHSPAN_PROGRESS_FD and the kind of standard error.
  static ProgressOptions from_process();
};

/// Shows how far this program is: told to `torchspan run` if it started us, else drawn as one live line on a
/// terminal, else printed as a plain line every ten seconds. Works out the time left. Never blocks: what the
/// launcher does not read at once is dropped. One thread at a time.
class Progress {
 public:
  explicit Progress(Executor& executor, ProgressOptions options = ProgressOptions::from_process());
  /// finish().
  ~Progress();
  Progress(const Progress&) = delete;

  /// Cheap to call every step: shows at most ten reports a second, and always the last one.
  void report(ProgressReport report);
  /// Removes nothing: leaves the last report as a line of its own. Call before printing results.
  void finish();

 private:
  void show(const ProgressReport& report);
  bool due() const;

  Executor& executor_;
  const ProgressOptions options_;
  std::optional<ProgressReport> pending_;  ///< the last report while it has not been shown
  std::optional<TimePoint> shown_at_;
  bool line_open_ = false;
  std::optional<TimePoint> began_at_;
  double began_fraction_ = 0;
};

}  // namespace torchspan
