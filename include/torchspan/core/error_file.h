#pragma once
// The file to which a failed worker writes its error for the launcher.
#include <cstdint>
#include <exception>
#include <string>

namespace torchspan {

/// Encodes an exception as torchrun's error file: {"message": {"message": "TYPE: TEXT", "extraInfo":
/// {"py_callstack": …, "timestamp": "SECONDS"}}}. The callstack lists the remote calls of an Error, origin first.
std::string encode_error_file(const std::exception_ptr& exception, std::int64_t seconds_since_1970);

/// Writes that to `path` (TORCHELASTIC_ERROR_FILE) unless the file exists: the first error is the cause of
/// later ones. Does nothing for an empty path; ignores failures. Session::run() and Session::abort() call it.
void write_error_file(const std::string& path, const std::exception_ptr& exception) noexcept;

}  // namespace torchspan
