#include <fmt/format.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/log.h>

namespace torchspan {
namespace {
constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", "off"};
}

LogLevel parse_log_level(std::string_view text) {
  for (std::uint8_t i = 0; i < std::size(kNames); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  throw Error(ErrorKind::kInvalid,
              fmt::format("'{}' is no log level; use debug, info, warning, error or off", text));
}

Log::Log(std::string who, LogLevel least, Sink sink)
    : who_(std::move(who)), least_(least), sink_(std::move(sink)) {}

void Log::write(LogLevel level, std::string_view text) {
  if (!enabled(level) || level == LogLevel::kOff) return;
  const std::string line = fmt::format("torchspan[{}] {}: {}\n", who_, kNames[static_cast<int>(level)], text);
  if (sink_) {
    sink_(level, line);
  } else {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  }
}

}  // namespace torchspan
