#include "launch/whole_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <unistd.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {
namespace {

/// Whether a rename to `path` creates a file or replaces one.
bool is_replaceable(const std::string& path) {
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(path, ignored).type();
  return type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::regular;
}

/// Returns 0, or the reason as errno.
int write_to(const std::string& path, std::string_view text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) return errno;
  while (!text.empty()) {
    const auto written = write(file.get(), text.data(), text.size());
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

std::string write_whole_file(const std::string& path, std::string_view text) {
  int reason = 0;
  if (is_replaceable(path)) {
    const std::string temporary = fmt::format("{}.{}.new", path, getpid());
    reason = write_to(temporary, text);
    if (reason == 0 && rename(temporary.c_str(), path.c_str()) != 0) reason = errno;
    if (reason != 0) unlink(temporary.c_str());
  } else {
    reason = write_to(path, text);
  }
  return reason == 0 ? "" : std::strerror(reason);
}

}  // namespace torchspan::launch
