#include "launch/whole_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/api/descriptor.h"
#include "core/api/write_all.h"

namespace torchspan::launch {
namespace {

/// Whether a rename to `path` creates a file or replaces one.
bool is_replaceable(const std::string& path) {
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(path, ignored).type();
  return type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::regular;
}

/// Whether `path` names the file that a descriptor of this process refers to.
bool is_same_file(const std::string& path, int descriptor) {
  struct stat named {
  }, opened{};
  return stat(path.c_str(), &named) == 0 && fstat(descriptor, &opened) == 0 &&
         named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

/// Returns the standard stream whose file `path` names, or -1. Pipes and devices are opened again instead: this loses
/// nothing, and works if another process has made the stream non-blocking.
int stream_of(const std::string& path) {
  std::error_code ignored;
  const auto type = std::filesystem::status(path, ignored).type();
  if (type == std::filesystem::file_type::fifo || type == std::filesystem::file_type::character) return -1;
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    if (is_same_file(path, stream)) return stream;
  }
  return -1;
}

/// Returns 0, or the reason as errno: ENXIO for a pipe that no process reads, instead of waiting for one.
int write_to(const std::string& path, std::string_view text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666));
  if (!file) return errno;
  if (fcntl(file.get(), F_SETFL, fcntl(file.get(), F_GETFL) & ~O_NONBLOCK) != 0) return errno;
  return write_all(file.get(), text);
}

/// Returns 0, or the reason as errno.
int replace(const std::string& path, std::string_view text) {
  const std::string temporary = fmt::format("{}.{}.new", path, getpid());
  int reason = write_to(temporary, text);
  if (reason == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) reason = errno;
  if (reason != 0) unlink(temporary.c_str());
  return reason;
}

std::string describe_reason(int reason, const std::string& path) {
  std::error_code ignored;
  if (reason == ENXIO && std::filesystem::is_fifo(path, ignored)) return "no process reads this pipe";
  return reason == 0 ? "" : std::strerror(reason);
}

}  // namespace

std::string write_whole_file(const std::string& path, std::string_view text) {
  if (const int stream = stream_of(path); stream >= 0) return describe_reason(write_all(stream, text), path);
  return describe_reason(is_replaceable(path) ? replace(path, text) : write_to(path, text), path);
}

bool is_standard_output(const std::string& path) { return is_same_file(path, STDOUT_FILENO); }

}  // namespace torchspan::launch
