#include "rendezvous/api/files.h"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/rendezvous.h>

namespace torchspan::rendezvous {
namespace {

/// A socket's path has at most 107 characters; this leaves 47 for the file's name.
constexpr std::size_t kLongestFolder = 60;

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

std::string how_to_make(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/'));
  const bool there = folder == path || folder.empty() || exists(folder);
  return fmt::format("make one with: (umask 077; {}openssl rand -hex 32 > '{}')",
                     there ? "" : fmt::format("mkdir -p '{}'; ", folder), path);
}

void make_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("folder '{}' cannot be created: {}", path, std::strerror(errno)));
  }
}

}  // namespace

net::Secret load_secret(const WorkerEnvironment& worker) {
  const std::string& path = worker.secret_file;
  if (path.empty()) {
    throw Error(ErrorKind::kInvalid,
                "neither TORCHSPAN_SECRET_FILE nor HOME is set, so there is no cluster secret; set "
                "TORCHSPAN_SECRET_FILE to a file that all workers of the job can read");
  }
  if (exists(path)) return net::Secret::from_file(path);
  if (worker.secret_named) {
    throw Error(ErrorKind::kInvalid, fmt::format("TORCHSPAN_SECRET_FILE is '{}', which does not exist; {}",
                                                 path, how_to_make(path)));
  }
  if (!worker.one_host() && worker.certificate_file.empty()) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("there is no cluster secret in '{0}', and the workers of this job run on several "
                    "hosts, so each would make its own; on one host {1} and copy it to the others (mode "
                    "0600), or set TORCHSPAN_SECRET_FILE to a file that all can read",
                    path, how_to_make(path)));
  }
  make_folder(path.substr(0, path.rfind('/')));
  try {
    net::Secret::random().write_file(path);
  } catch (const Error&) {
    if (!exists(path)) throw;  // else another worker of this job created it first
  }
  return net::Secret::from_file(path);
}

namespace {

/// A socket file is checked only at this age, when its owner has had time to bind it.
constexpr std::time_t kStaleAfterSeconds = 60;

/// Whether no process has the socket open. A datagram socket cannot connect to a listener, which does not
/// notice the attempt; the error shows whether there is a listener.
bool is_abandoned(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return false;
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool refused =
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
  close(fd);
  return refused;
}

/// Removes the sockets of workers that were killed.
void remove_stale_sockets(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string path = entry.path().string();
    struct stat about {};
    if (!path.ends_with(".sock") || lstat(path.c_str(), &about) != 0 || !S_ISSOCK(about.st_mode)) continue;
    if (std::time(nullptr) - about.st_mtime > kStaleAfterSeconds && is_abandoned(path)) unlink(path.c_str());
  }
}

}  // namespace

std::string make_runtime_folder(const WorkerEnvironment& worker) {
  const std::string path = worker.runtime_folder.empty()
                               ? fmt::format("{}/torchspan-{}", worker.temporary_folder, geteuid())
                               : worker.runtime_folder;
  if (path.size() > kLongestFolder) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the folder for sockets '{}' has {} characters, more than {}; set "
                            "TORCHSPAN_RUNTIME_DIR to a shorter path",
                            path, path.size(), kLongestFolder));
  }
  make_folder(path);
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0 || !S_ISDIR(about.st_mode)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("'{}' is not a folder, so sockets cannot be created there; remove it, "
                            "or set TORCHSPAN_RUNTIME_DIR to another one",
                            path));
  }
  if (about.st_uid != geteuid() || (about.st_mode & 077) != 0) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format("folder '{}' belongs to user {} and has mode {:04o}; sockets need one of this user ({}) "
                    "with mode 0700: correct it, or set TORCHSPAN_RUNTIME_DIR to another one",
                    path, about.st_uid, about.st_mode & 07777, geteuid()));
  }
  remove_stale_sockets(path);
  return path;
}

}  // namespace torchspan::rendezvous
