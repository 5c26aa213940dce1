#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {

/// What a caller can do about a failure; the number travels on the wire and never changes meaning.
enum class ErrorKind : std::uint8_t {
  kInvalid = 1,        ///< the call itself is wrong: correct the argument named in the message
  kRemoteFailure = 2,  ///< user code on another worker threw: see frames()
  kDisconnected = 3,   ///< the other worker died or left: start it again, or go on without it
  kTimedOut = 4,       ///< the deadline passed: the work may still happen over there
  kCancelled = 5,      ///< somebody asked to stop, or this worker is shutting down
  kOverloaded = 6,     ///< a bounded queue or pool is full: try again later
  kDenied = 7,         ///< authentication or permission failed
  kUnsupported = 8,    ///< this build, version or backend cannot do it
};

/// The kind's name as it is printed: "invalid", "remote failure", … ; "unknown kind" for a foreign number.
std::string_view to_string(ErrorKind kind);

/// One hop of a failure that crossed workers: who ran which call, and what was thrown there.
struct RemoteFrame {
  std::string worker;  ///< name of the worker that ran the call
  std::string call;    ///< the call's name: a function token, an operator, a message
  std::string type;    ///< demangled C++ type of what was thrown
  std::string text;    ///< its what()
};

/// The one exception type of the library. Copyable, immutable once thrown; what() is the whole story in one
/// text: kind, worker, call, elapsed time and the chain of remote frames.
class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message);

  /// Adds the worker concerned; returns itself so that it can be thrown in the same expression.
  Error& with_worker(std::string worker);
  /// Adds the call concerned (a token's name, an operator, a message).
  Error& with_call(std::string call);
  /// Adds the time from the call to the failure.
  Error& with_elapsed(Duration elapsed);
  /// Appends a hop; the first frame is where the failure began.
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

/// Throws an Error of kind kInvalid.
[[noreturn]] void throw_invalid(std::string message);

/// The Error that `exception` is or that is nested in it (std::nested_exception); any other exception becomes
/// kInvalid with its type and text.
Error to_error(const std::exception_ptr& exception);

/// Demangled dynamic type and text of any exception, for reports.
struct ExceptionStory {
  std::string type;
  std::string text;
};
ExceptionStory describe(const std::exception_ptr& exception);

}  // namespace torchspan
