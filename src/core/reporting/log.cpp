#include <cerrno>
#include <fmt/format.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/log.h>

#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"

namespace torchspan {
namespace {
constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", "off"};

}  // namespace

LogLevel parse_log_level(std::string_view text) {
  for (std::uint8_t i = 0; i < std::size(kNames); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  throw_invalid("'{}' is not a log level; set TORCHSPAN_LOG_LEVEL to debug, info, warning, error or off",
                text);
}

Log::Log(std::string owner, LogLevel least, Sink sink)
    : owner_(std::move(owner)), least_(least), sink_(std::move(sink)) {}

void Log::write(LogLevel level, std::string_view text) {
  if (!enabled(level) || level == LogLevel::kOff) return;
  const std::string line =
      fmt::format("torchspan[{}] {}: {}\n", owner_, kNames[static_cast<int>(level)], text);
  if (sink_) {
    sink_(level, line);
  } else {
    // One system call for a line of ordinary length, so that lines of several processes do not mix. A log that cannot be
    // written must not stop the work.
    static_cast<void>(write_all(STDERR_FILENO, line));
  }
}

}  // namespace torchspan
