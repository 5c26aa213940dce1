#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "launch/supervisor/endings.h"

namespace torchspan::launch {

/// The largest error file that is read.
inline constexpr std::size_t kMostErrorBytes = std::size_t{1} << 20;

/// A worker's uncaught exception, as its error file describes it: torchrun's
/// {"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": …}}}, or {"message": TEXT}.
struct WorkerError {
  std::string message;         ///< type and text
  std::string callstack;       ///< may be empty
  std::int64_t timestamp = 0;  ///< seconds since 1970; 0 if it is not given
};

/// Decodes an error file; nullopt unless it is such JSON with a message. Pure; accepts any bytes.
std::optional<WorkerError> decode_worker_error(std::string_view json);

/// Reads the error file of a worker; nullopt if it does not exist, is not a regular file, has more than
/// kMostErrorBytes, or is malformed.
std::optional<WorkerError> read_worker_error(const std::string& path);

/// Returns the message for a summary: at most 10 lines and 2000 bytes, control characters as '?'.
std::string shorten_message(std::string_view message);

/// Encodes the launcher's own error file: the first failure with its exit code as "errorCode", as torchrun
/// writes it. Without an error of the worker, `details.last_lines` take the place of its callstack.
std::string encode_job_error(const std::optional<WorkerError>& error, const Ending& first,
                             const FailureDetails& details);

}  // namespace torchspan::launch
