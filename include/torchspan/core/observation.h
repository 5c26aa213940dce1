#pragma once
// What a worker shows of its run: options, spans, curves, progress (docs/observability.md). Includes no LibTorch.
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan {

/// What a worker writes and serves about its run (docs/observability.md). By default, nothing but a socket for
/// `torchspan stacks` and `torchspan top` under `torchspan run`.
struct ObservationOptions {
  std::string trace_folder = {};               ///< for the trace file of this worker; empty: none
  std::uint64_t most_trace_spans = 1'000'000;  ///< later ones are counted, not written
  /// Port on the loopback interface that serves metrics in Prometheus' text format; 0: a free one.
  std::optional<std::uint16_t> metrics_port = {};
  std::string tensorboard_folder = {};  ///< for event files with the logged scalars; empty: none
  std::string scalars_folder = {};      ///< for the same as JSON lines; empty: none
  std::string socket_folder = {};       ///< for the socket that serves this worker's state; empty: none

  /// Reads TORCHSPAN_TRACE, TORCHSPAN_TRACE_SPANS, TORCHSPAN_METRICS_PORT (the first rank's on its host),
  /// TORCHSPAN_TENSORBOARD, TORCHSPAN_SCALARS, LOCAL_RANK and TORCHSPAN_RUNTIME_DIR. Throws Error{kInvalid} that
  /// names the wrong variable.
  static ObservationOptions from(const std::map<std::string, std::string>& environment);
};

/// Something that has a runtime: a Session or a Worker.
template <class Source>
concept RuntimeSource = requires(Source& source) {
  { source.runtime() } -> std::convertible_to<Runtime&>;
};

/// Shows a part of the program in the trace, from construction to destruction: `ts::Span span(session,
/// "augment")`. Costs about 0.2 µs. The session's runtime must outlive it.
class Span {
 public:
  template <RuntimeSource Source>
  Span(Source& source, std::string_view name) : scope_(source.runtime().spans, SpanKind::kUser, name) {}
  /// A span named "step" delimits a training step in reports; `number` is shown.
  template <RuntimeSource Source>
  Span(Source& source, std::string_view name, std::uint64_t number)
      : scope_(source.runtime().spans, SpanKind::kUser, name, number) {}

 private:
  SpanScope scope_;
};

/// Adds a point to the curve `tag` in the trace, TensorBoard and JSON lines, whichever the run writes: no
/// file is written on this thread. Without `step`, the values of a tag are numbered from 0. Throws Error{kInvalid} in a
/// forked child.
template <RuntimeSource Source>
void log_scalar(Source& source, std::string_view tag, double value,
                std::optional<std::int64_t> step = std::nullopt) {
  Runtime& runtime = source.runtime();
  runtime.check_process();
  runtime.scalars.add(tag, value, step, runtime.executor.now());
}

class SpanRecorder;

/// A program's progress. Zero and empty fields are not shown.
struct ProgressReport {
  std::int64_t epoch = 0;  ///< counted from 1
  std::int64_t epochs = 0;
  std::int64_t step = 0;  ///< finished steps of this epoch
  std::int64_t steps = 0;
  std::optional<double> loss = {};
  double rate = 0;  ///< units per second
  std::string unit = "samples";
  std::string text = {};                    ///< free text at the end of the line
  std::optional<double> seconds_left = {};  ///< set by Progress
};

/// Fraction of all work that is done, 0 to 1; nullopt if the totals are unknown.
std::optional<double> fraction_done(const ProgressReport& report);

/// Encodes the line "torchspan-progress 1 epoch=2/5 step=17/469 loss=0.512 rate=5120 left=63 unit=images
/// text=…" that a program writes to the descriptor TORCHSPAN_PROGRESS_FD. Unset fields are omitted; '%',
/// blanks and control characters in values are written %XX. Readers skip unknown keys.
std::string encode_progress(const ProgressReport& report);
/// Decodes such a line, with or without its newline; nullopt for any other line.
std::optional<ProgressReport> decode_progress(std::string_view line);

/// "epoch 2/5  step 17/469  loss 0.5120  5,120 images/s  1m03s left  text", cut to `width` characters.
std::string format_progress(const ProgressReport& report, std::size_t width = 1000);
/// "7s", "1m03s", "2h05m".
std::string format_seconds(double seconds);

struct ProgressOptions {
  int launcher_descriptor = -1;  ///< where the launcher reads, or -1
  int descriptor = 2;            ///< output if there is no launcher
  bool terminal = false;         ///< `descriptor` is a terminal: redraw one line
  std::size_t width = 80;        ///< of the terminal
  Duration draw_every = std::chrono::milliseconds(100);
  Duration print_every = std::chrono::seconds(10);

  /// Derives options from TORCHSPAN_PROGRESS_FD and the type of standard error.
  static ProgressOptions from_process();
};

/// Shows a program's progress and estimates the remaining time: sends it to `torchspan run` if that started
/// the program, else redraws one line on a terminal, else prints a line every ten seconds. Never blocks:
/// reports that the launcher does not read in time are dropped. In a trace, the time between two reports is a step.
/// Not thread-safe.
class Progress {
 public:
  /// For a Session or a Worker, which must outlive it.
  template <class Source>
  requires requires(Source& source) { source.runtime().spans; }
  explicit Progress(Source& source, ProgressOptions options = ProgressOptions::from_process())
      : Progress(source.runtime().executor, options) {
    spans_ = &source.runtime().spans;
  }
  explicit Progress(Executor& executor, ProgressOptions options = ProgressOptions::from_process());
  /// Calls finish().
  ~Progress();
  Progress(const Progress&) = delete;

  /// Cheap enough for every step: shows at most ten reports per second, and always the last one.
  void report(ProgressReport report);
  /// Ends the live line and keeps the last report visible. Call it before printing results.
  void finish();
  /// Time since construction.
  Duration elapsed() const { return executor_.now() - constructed_at_; }

 private:
  void show(const ProgressReport& report);
  bool due() const;
  void record_step(const ProgressReport& report, TimePoint now);

  Executor& executor_;
  const ProgressOptions options_;
  const TimePoint constructed_at_;
  std::optional<ProgressReport> pending_;  ///< last report, until it is shown
  std::optional<TimePoint> shown_at_;
  bool line_open_ = false;
  SpanRecorder* spans_ = nullptr;  ///< where steps are recorded, if the run is traced
  std::optional<TimePoint> reported_at_;
  std::optional<TimePoint> began_at_;
  double began_fraction_ = 0;
};

}  // namespace torchspan
