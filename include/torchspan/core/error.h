#pragma once
// Error and its kinds; the file to which a failed worker writes its error for the launcher. Includes no LibTorch.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {

/// What a caller can do about a failure. The number is sent on the wire and never changes meaning.
enum class ErrorKind : std::uint8_t {
  kInvalid = 1,        ///< wrong call: fix the argument named in the message
  kRemoteFailure = 2,  ///< user code on another worker threw: see frames()
  kDisconnected = 3,   ///< the other worker died or left: restart it or continue without it
  kTimedOut = 4,       ///< the deadline passed; the work may still happen remotely
  kCancelled = 5,      ///< cancelled by a caller, or this worker is shutting down
  kOverloaded = 6,     ///< a bounded queue or pool is full: retry later
  kDenied = 7,         ///< authentication or permission failed
  kUnsupported = 8,    ///< not supported by this build, version or backend
};

/// The printed name of a kind: "invalid", "remote failure", …; "unknown kind" for any other number.
std::string_view to_string(ErrorKind kind);

/// Texts of errors and of their frames are cut to this many bytes.
inline constexpr std::size_t kMaxErrorText = std::size_t{64} << 10;

/// Cuts `text` after at most `most` bytes, not inside of a UTF-8 character, and appends "… (N more bytes)".
std::string shortened(std::string text, std::size_t most = kMaxErrorText);

/// One hop of a failure that crossed workers: which worker ran which call, and what it threw.
struct RemoteFrame {
  std::string worker;  ///< worker that ran the call
  std::string call;    ///< function token, operator or message
  std::string type;    ///< demangled C++ type of the exception
  std::string text;    ///< its what(), and those of the exceptions nested in it
};

/// The library's only exception type. Copyable; immutable once thrown. what() contains kind, worker, call,
/// elapsed time and the chain of remote frames. Long texts are shortened() to kMaxErrorText.
class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message);

  /// Sets the affected worker; returns *this, for use in a throw expression.
  Error& with_worker(std::string worker);
  /// Sets the affected call (a token's name, an operator, a message).
  Error& with_call(std::string call);
  /// Sets the time from the call to the failure.
  Error& with_elapsed(Duration elapsed);
  /// Appends a hop; the first frame is the origin of the failure.
  Error& with_frame(RemoteFrame frame);

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& worker() const noexcept { return worker_; }
  const std::string& call() const noexcept { return call_; }
  Duration elapsed() const noexcept { return elapsed_; }
  const std::vector<RemoteFrame>& frames() const noexcept { return frames_; }
  const char* what() const noexcept override { return text_.c_str(); }
  /// what() without the frames: kind, message, call, worker and time.
  std::string headline() const { return text_.substr(0, headline_); }

 private:
  void compose();

  ErrorKind kind_;
  std::string message_;
  std::string worker_;
  std::string call_;
  Duration elapsed_{0};
  std::vector<RemoteFrame> frames_;
  std::string text_;
  std::size_t headline_ = 0;
};

/// Throws Error{kInvalid}.
[[noreturn]] void throw_invalid(std::string message);

/// Returns the Error that `exception` is, or that is nested in it (std::nested_exception), then with the texts of the
/// exceptions around it unless it came from another worker. Any other exception becomes kInvalid with its type and text.
Error to_error(const std::exception_ptr& exception);

/// Demangled dynamic type of an exception; its what() or, if it is a string, the string, and the same of the exceptions
/// nested in it. An Error from another worker is not part of the text: its frames say more.
struct ExceptionDescription {
  std::string type;
  std::string text;
};
ExceptionDescription describe(const std::exception_ptr& exception);

/// Encodes an exception as torchrun's error file: {"message": {"message": "TYPE: TEXT", "extraInfo":
/// {"py_callstack": …, "timestamp": "SECONDS"}}}. The callstack lists the remote calls of an Error, origin first.
std::string encode_error_file(const std::exception_ptr& exception, std::int64_t seconds_since_1970);

/// Writes that to `path` (TORCHELASTIC_ERROR_FILE) unless the file exists: the first error is the cause of
/// later ones. Does nothing for an empty path; ignores failures. Session::run() and Session::abort() call it.
void write_error_file(const std::string& path, const std::exception_ptr& exception) noexcept;

}  // namespace torchspan
