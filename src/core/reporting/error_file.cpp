#include <cstdio>
#include <ctime>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/error_file.h>

#include "core/api/descriptor.h"

namespace torchspan {
namespace {

/// Length of the valid UTF-8 character at the start of `text`; 0 if there is none.
std::size_t character_size(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const auto continues = [&](std::size_t at) { return at < text.size() && (byte(at) & 0xC0) == 0x80; };
  if (byte(0) < 0x80) return 1;
  if (byte(0) >= 0xC2 && byte(0) <= 0xDF) return continues(1) ? 2 : 0;
  if (byte(0) >= 0xE0 && byte(0) <= 0xEF) {
    if (!continues(1) || !continues(2)) return 0;
    const bool overlong = byte(0) == 0xE0 && byte(1) < 0xA0, surrogate = byte(0) == 0xED && byte(1) > 0x9F;
    return overlong || surrogate ? 0 : 3;
  }
  if (byte(0) >= 0xF0 && byte(0) <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    const bool overlong = byte(0) == 0xF0 && byte(1) < 0x90, beyond = byte(0) == 0xF4 && byte(1) > 0x8F;
    return overlong || beyond ? 0 : 4;
  }
  return 0;
}

/// A JSON string: any bytes become valid JSON, those that are no UTF-8 become '?'.
std::string quote(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const std::size_t size = character_size(text);
    const char c = text.front();
    if (size == 0) {
      out += '?';
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (size == 1 && static_cast<unsigned char>(c) < ' ') {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return out + "\"";
}

/// The calls through which the exception came.
std::string callstack_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    std::string text = error.headline();
    for (const RemoteFrame& frame : error.frames()) {
      text += fmt::format("\n  on {}, in {}: {}: {}", frame.worker, frame.call, frame.type, frame.text);
    }
    return text;
  } catch (...) {
    return "";
  }
}

}  // namespace

std::string encode_error_file(const std::exception_ptr& exception, std::int64_t seconds_since_1970) {
  const ExceptionDescription description = describe(exception);
  return fmt::format(
      R"({{"message": {{"message": {}, "extraInfo": {{"py_callstack": {}, "timestamp": "{}"}}}}}})"
      "\n",
      quote(fmt::format("{}: {}", description.type, description.text)), quote(callstack_of(exception)),
      seconds_since_1970);
}

void write_error_file(const std::string& path, const std::exception_ptr& exception) noexcept {
  if (path.empty()) return;
  try {
    const std::string text = encode_error_file(exception, std::time(nullptr));
    const std::string temporary = fmt::format("{}.{}", path, getpid());
    Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file) return;
    if (write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
      [[maybe_unused]] const int linked = link(temporary.c_str(), path.c_str());
    }
    unlink(temporary.c_str());
  } catch (...) {  // the program is ending with its error, which matters more
  }
}

}  // namespace torchspan
