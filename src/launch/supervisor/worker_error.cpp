#include "launch/supervisor/worker_error.h"

#include <algorithm>
#include <charconv>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/api/descriptor.h"
#include "core/api/json_fields.h"

namespace torchspan::launch {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& object, const char* key) {
  return json_field<std::string>(object, key).value_or("");
}

/// torchrun writes the time as a text; others write a number.
std::int64_t time_of(const Json& object) {
  if (const auto number = json_field<std::int64_t>(object, "timestamp")) return *number;
  const std::string text = text_of(object, "timestamp");
  std::int64_t time = 0;
  std::from_chars(text.data(), text.data() + text.size(), time);
  return time;
}

std::string joined_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

}  // namespace

std::optional<WorkerError> decode_worker_error(std::string_view json) {
  if (json.size() > kMostErrorBytes) return std::nullopt;
  const Json file = Json::parse(json, nullptr, false);
  if (!file.is_object() || !file.contains("message")) return std::nullopt;
  const Json& outer = file["message"];
  WorkerError error;
  if (outer.is_string()) error.message = outer.get<std::string>();
  if (outer.is_object()) {
    error.message = text_of(outer, "message");
    if (const auto extra = outer.find("extraInfo"); extra != outer.end() && extra->is_object()) {
      error.callstack = text_of(*extra, "py_callstack");
      error.timestamp = time_of(*extra);
    }
  }
  if (error.message.empty()) return std::nullopt;
  return error;
}

std::optional<WorkerError> read_worker_error(const std::string& path) {
  // O_NONBLOCK: a worker may have put a pipe there.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat about {};
  if (!file || fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode)) return std::nullopt;
  if (about.st_size < 0 || static_cast<std::size_t>(about.st_size) > kMostErrorBytes) return std::nullopt;
  std::string text(static_cast<std::size_t>(about.st_size), '\0');
  const auto got = pread(file.get(), text.data(), text.size(), 0);
  if (got < 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(got));
  return decode_worker_error(text);
}

std::string shorten_message(std::string_view message) {
  constexpr std::size_t kMostBytes = 2000;
  constexpr std::ptrdiff_t kMostLines = 10;
  std::string text;
  std::ptrdiff_t lines = 1;
  for (const char c : message) {
    lines += c == '\n';
    // Cuts between characters of UTF-8 only.
    if (lines > kMostLines || (text.size() >= kMostBytes && (static_cast<unsigned char>(c) & 0xC0) != 0x80)) {
      return text + " …";
    }
    const auto code = static_cast<unsigned char>(c);
    text += c == '\n' ? std::string("\n    ") : std::string(1, code < ' ' || code == 0x7f ? '?' : c);
  }
  return text;
}

std::string encode_job_error(const std::optional<WorkerError>& error, const Ending& first,
                             const FailureDetails& details) {
  const WorkerError shown = error.value_or(WorkerError{
      fmt::format("{} (rank {}, pid {}) {}", first.name, first.rank, first.pid, describe_failure(first)),
      joined_lines(details.last_lines), 0});
  Json extra = {{"py_callstack", shown.callstack}};
  if (shown.timestamp != 0) extra["timestamp"] = std::to_string(shown.timestamp);
  const int code = first.signal != 0 ? -first.signal : first.code;  // a signal is negative, as in Python
  const Json file = {{"message", {{"message", shown.message}, {"extraInfo", extra}, {"errorCode", code}}}};
  return file.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace torchspan::launch
