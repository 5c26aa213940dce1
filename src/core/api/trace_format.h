#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// The worker that a trace file describes.
struct TraceIdentity {
  std::string name;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::string host;   ///< name
  std::string clock;  ///< equal for processes that share a monotonic clock
  std::string run;    ///< id of the job
  std::int32_t attempt = 0;
  std::int64_t process = 0;     ///< id on its host
  std::int64_t began = 0;       ///< nanoseconds of the clock
  std::int64_t unix_began = 0;  ///< the same moment as nanoseconds since 1970
};

/// Counters at one moment.
struct CounterSample {
  std::int64_t at = 0;  ///< nanoseconds of the clock
  std::map<std::string, std::uint64_t> values;
};

/// The contents of one worker's trace file (docs/trace_format.md).
struct TraceContents {
  TraceIdentity identity;
  std::vector<std::string> names;
  std::vector<std::string> threads;
  std::vector<StoredSpan> spans;
  std::vector<Scalar> scalars;
  std::vector<ClockSample> clock_samples;
  std::vector<CounterSample> counters;
  std::uint64_t lost = 0;     ///< spans that were not written
  bool complete = false;      ///< the worker closed the file
  std::uint64_t ignored = 0;  ///< bytes at the end that are not a whole block
};

/// Encodes a trace file block by block.
class TraceEncoder {
 public:
  /// Starts the file.
  void identity(const TraceIdentity& identity);
  /// `first` is the number of the first name.
  void names(std::uint32_t first, const std::vector<std::string>& names);
  void threads(std::uint32_t first, const std::vector<std::string>& names);
  void spans(const std::vector<StoredSpan>& spans);
  void scalars(const std::vector<Scalar>& scalars);
  void clock_samples(const std::vector<ClockSample>& samples);
  void counters(const CounterSample& sample);
  /// Replaces the number of earlier blocks.
  void lost(std::uint64_t spans);
  void end();

  Bytes take() { return file_.take(); }

 private:
  void add(std::uint8_t type, ByteWriter block);

  ByteWriter file_;
};

/// Decodes a trace file, up to the first block that is truncated or damaged: a worker that was killed leaves one.
/// Throws Error{kInvalid} if the bytes are not a trace file or its first block is damaged.
TraceContents decode_trace(BytesView file);

}  // namespace torchspan
