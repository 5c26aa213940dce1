#pragma once
// The log of a worker, which a program may redirect. Includes no LibTorch.
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace torchspan {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError, kOff };

/// Parses "debug", "info", "warning", "error" or "off"; anything else throws Error{kInvalid} with the list.
LogLevel parse_log_level(std::string_view text);

/// Writes lines "torchspan[worker1] warning: …" to standard error or to a custom sink. Created in main(),
/// one per worker, and passed down. Thread-safe; lines are not interleaved.
class Log {
 public:
  /// Receives lines that passed the level. Called concurrently from any thread; must not throw.
  using Sink = std::function<void(LogLevel, const std::string& line)>;
  explicit Log(std::string owner, LogLevel least = LogLevel::kWarning, Sink sink = {});

  bool enabled(LogLevel level) const { return level >= least_.load(std::memory_order_relaxed); }
  void set_level(LogLevel least) { least_.store(least, std::memory_order_relaxed); }
  void write(LogLevel level, std::string_view text);
  void debug(std::string_view text) { write(LogLevel::kDebug, text); }
  void info(std::string_view text) { write(LogLevel::kInfo, text); }
  void warning(std::string_view text) { write(LogLevel::kWarning, text); }
  void error(std::string_view text) { write(LogLevel::kError, text); }
  const std::string& owner() const { return owner_; }

 private:
  const std::string owner_;
  std::atomic<LogLevel> least_;
  const Sink sink_;
};

}  // namespace torchspan
