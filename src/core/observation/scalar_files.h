#pragma once
#include <string>

#include <torchspan/detail/core/runtime.h>

#include "core/api/descriptor.h"
#include "core/api/trace_format.h"

namespace torchspan {

/// Encodes one record of a TensorBoard event file: length, data and their masked checksums.
Bytes encode_event_record(BytesView event);
/// Encodes the event of one scalar, or of the file's version if `scalar` is null.
Bytes encode_event(double unix_seconds, const Scalar* scalar);
/// Encodes a scalar as a line of JSON; values that are not finite become strings.
std::string encode_scalar_line(double unix_seconds, int rank, const Scalar& scalar);

/// Writes logged scalars to a TensorBoard event file and to a file of JSON lines. For one thread at a time.
class ScalarFiles {
 public:
  /// Empty folders: no file. Throws Error{kInvalid} if a file cannot be created.
  ScalarFiles(Runtime& runtime, const std::string& tensorboard_folder, const std::string& lines_folder,
              const TraceIdentity& identity);
  void write_new();

 private:
  double unix_seconds(TimePoint at) const;
  void append(Descriptor& file, BytesView bytes);

  Runtime& runtime_;
  const TraceIdentity identity_;
  Descriptor events_, lines_;
  std::uint64_t next_ = 0;
  std::uint64_t lost_ = 0;
};

}  // namespace torchspan
