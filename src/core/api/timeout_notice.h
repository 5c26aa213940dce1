#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/core/time.h>

namespace torchspan {

/// The pipe to `torchspan run` that TORCHSPAN_PROGRESS_FD names, set to never block and not to be inherited; -1 if there is
/// none. A process that a worker started may have another file at that descriptor, so only a pipe counts.
int launcher_pipe();

/// When a wait for other ranks logs a warning with those that are missing: after 10 s, 20 s, 40 s, ….
class WaitWarnings {
 public:
  /// The length of the wait after which the next warning is due.
  Duration next() const { return next_; }
  /// Whether a warning is due after a wait of `waited`; the next one then is due after twice the time.
  bool due(Duration waited) {
    if (waited < next_) return false;
    next_ *= 2;
    return true;
  }

 private:
  Duration next_ = std::chrono::seconds(10);
};

/// An operation that ended because its time limit passed. Kinds are those of open operations in a worker's state, and
/// "handler": the handler of `name`, called by `peer`, had made the call of the notice before.
struct TimeoutNotice {
  std::string kind = {};    ///< "call", "handler", "collective", "wait", "autograd", "pipeline"
  std::string name = {};    ///< function or operation
  std::string peer = {};    ///< worker that was called; empty: none
  std::string site = {};    ///< "train.cpp:41"; empty: unknown
  std::string detail = {};  ///< what it waited for; may be empty
  double seconds = 0;       ///< how long it had lasted
  std::uint64_t id = 0;     ///< number of the operation in its group, pass id, step id
  int part = -1;            ///< group of a collective operation
};

/// Encodes the line that a worker sends to `torchspan run`, with its newline, in at most 4096 bytes.
std::string encode_timeout(const TimeoutNotice& notice);
/// Decodes such a line, with or without its newline; nullopt for any other line.
std::optional<TimeoutNotice> decode_timeout(std::string_view line);

/// Sends the notice to `torchspan run`, which then examines the whole job; does nothing without it, and for
/// operations that lasted less than a second, which a program may expect to time out. Never blocks. Thread-safe.
void report_timeout(const TimeoutNotice& notice);

}  // namespace torchspan
