#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"

namespace torchspan {
namespace {

/// A JSON string; bytes that are not UTF-8 become replacement characters (U+FFFD).
std::string quote(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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
    std::string temporary = path + ".XXXXXX";  // several workers of one process may fail at once
    Descriptor file(mkostemp(temporary.data(), O_CLOEXEC));
    if (!file) return;
    if (write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
      [[maybe_unused]] const int linked = link(temporary.c_str(), path.c_str());
    }
    unlink(temporary.c_str());
  } catch (...) {  // the program is ending with its error, which matters more
  }
}

}  // namespace torchspan
