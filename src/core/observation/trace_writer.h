#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/descriptor.h"
#include "core/api/trace_format.h"

namespace torchspan {

/// Resident memory of this process in bytes; 0 if unknown.
std::uint64_t resident_bytes();
/// Processor time of all threads of this process, in seconds.
double processor_seconds();

/// Keeps the clock sample of each rank with the smallest delay in a window of time: the others would make the traces of
/// long runs large, and add nothing to the comparison of the clocks. For one thread at a time.
class FastestSamples {
 public:
  void add(const std::vector<ClockSample>& samples);
  /// Returns the samples, by rank, and begins a new window.
  std::vector<ClockSample> take(TimePoint now);
  /// The same if the window has lasted for `length`. Else returns those of ranks that had none yet: without one, the clock
  /// of a worker that is killed during the window would stay unknown.
  std::vector<ClockSample> take_if_due(TimePoint now, Duration length);

 private:
  std::map<int, ClockSample> fastest_;
  std::set<int> known_;  ///< ranks of which a sample was returned
  TimePoint begun_{};    ///< of the window
};

/// Writes one worker's trace file. For one thread at a time.
class TraceWriter {
 public:
  /// Creates FOLDER/NAME.ATTEMPT.PROCESS.trace (or ….2.trace, if that exists), and the folder. Throws Error{kInvalid} if that fails.
  TraceWriter(Runtime& runtime, const std::string& folder, const TraceIdentity& identity,
              std::uint64_t most_spans);

  /// Appends what was recorded since the last call, and returns how many spans that were. When the disk refuses it, logs
  /// this once and writes no more.
  std::size_t write_new();
  /// Appends what is missing and marks the file as complete.
  void end();

 private:
  /// write_new(), with a sample of the counters or without.
  std::size_t write(bool with_counters);
  std::size_t encode_new(TraceEncoder& encoder);
  void append(const Bytes& bytes);
  /// The least time between two samples of the counters, and of a rank's clock. Grows with the run: its file would otherwise grow
  /// by a gigabyte in a week, however little happens.
  Duration sample_interval() const;

  Runtime& runtime_;
  std::string path_;
  const std::uint64_t most_spans_;
  Descriptor file_;
  std::uint64_t written_ = 0;    ///< spans
  std::uint64_t discarded_ = 0;  ///< spans above the limit
  std::uint64_t reported_lost_ = 0;
  SpanRecorder::Cursor spans_;
  std::uint64_t next_scalar_ = 0;
  std::uint64_t next_clock_sample_ = 0;
  std::size_t next_name_ = 0;
  std::size_t next_thread_ = 0;
  FastestSamples clock_samples_;
  const TimePoint began_at_;
  TimePoint counted_at_;
};

/// The identity of this process's clock: equal for processes whose monotonic clocks are the same.
std::string clock_identity();

}  // namespace torchspan
