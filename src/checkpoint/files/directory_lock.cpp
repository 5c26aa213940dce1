#include "checkpoint/files/directory_lock.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <fmt/format.h>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "checkpoint/files/disk.h"

namespace torchspan::checkpoint {
namespace {

/// What the holder has written; another process may replace it meanwhile.
std::string holder_named_in(const Descriptor& file) {
  std::array<char, 256> bytes;
  const ssize_t got = ::pread(file.get(), bytes.data(), bytes.size(), 0);
  const std::string_view all(bytes.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  const std::string_view line = all.substr(0, all.find('\n'));
  return line.empty() ? "another process" : std::string(line);
}

}  // namespace

std::string DirectoryLock::take(const std::string& directory, const std::string& holder) {
  if (file_) return "";
  const std::string path = directory + "/lock";
  Descriptor file =
      Descriptor::not_inherited([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); });
  if (!file) throw_disk_error("create", path, errno);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      throw_invalid(
          fmt::format("{} writes its checkpoints to '{}' too, so this CheckpointManager must not: end that "
                      "job or destroy that "
                      "manager first, or choose another directory",
                      holder_named_in(file), directory));
    }
    return fmt::format("the directory '{}' cannot be locked ({}): make sure that no other job writes to it",
                       directory, std::generic_category().message(errno));
  }
  const std::string line = holder + "\n";
  // Only the text of an error depends on it, so a full disk does not matter here.
  if (::ftruncate(file.get(), 0) == 0) {
    [[maybe_unused]] const ssize_t written = ::pwrite(file.get(), line.data(), line.size(), 0);
  }
  file_ = std::move(file);
  return "";
}

std::string describe_holder(const std::string& rank) {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {'?'};
  return fmt::format("{} of process {} on {}", rank, ::getpid(), host.data());
}

}  // namespace torchspan::checkpoint
