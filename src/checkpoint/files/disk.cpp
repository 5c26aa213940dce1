#include "checkpoint/files/disk.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::size_t kPartBytes = std::size_t{1} << 20;  ///< fits into a cache, for what uses it next
constexpr std::uint64_t kHandOverBytes = std::uint64_t{16} << 20;

struct OpenFile {
  explicit OpenFile(int descriptor) : fd(descriptor) {}
  ~OpenFile() {
    if (fd >= 0) ::close(fd);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  const int fd;
};

struct DiskFailure {
  ErrorKind kind;
  const char* advice;
};

DiskFailure failure_of_errno(int number) {
  switch (number) {
    case ENOSPC:
    case EDQUOT:
      return {ErrorKind::kOverloaded, "free space, or keep fewer checkpoints"};
    case EMFILE:
    case ENFILE:
      return {ErrorKind::kOverloaded, "check the directory"};
    case EACCES:
    case EPERM:
    case EROFS:
      return {ErrorKind::kDenied, "choose a directory that this user may write"};
    case EIO:
      return {ErrorKind::kInvalid, "the device fails; choose a directory on another one"};
    default:
      return {ErrorKind::kInvalid, "check the directory"};
  }
}

}  // namespace

void throw_disk_error(const char* verb, const std::string& path, int number) {
  const DiskFailure failure = failure_of_errno(number);
  throw Error(failure.kind, fmt::format("cannot {} '{}': {}; {}", verb, path,
                                        std::generic_category().message(number), failure.advice));
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

int DiskCalls::open(const char* path, int flags, unsigned mode) { return ::open(path, flags, mode); }
ssize_t DiskCalls::pwrite(int fd, const void* data, std::size_t size, off_t offset) {
  return ::pwrite(fd, data, size, offset);
}
ssize_t DiskCalls::pread(int fd, void* data, std::size_t size, off_t offset) {
  return ::pread(fd, data, size, offset);
}
int DiskCalls::fsync(int fd) { return ::fsync(fd); }
int DiskCalls::rename(const char* from, const char* to) { return ::rename(from, to); }
int DiskCalls::access(const char* path, int mode) { return ::faccessat(AT_FDCWD, path, mode, AT_EACCESS); }
int DiskCalls::unlink(const char* path) { return ::unlink(path); }
void DiskCalls::remove_all(const char* path, std::error_code& error) {
  std::filesystem::remove_all(path, error);
}

OutputFile::OutputFile(const Disk& disk, std::string path, int fd)
    : disk_(disk), path_(std::move(path)), fd_(fd) {}

OutputFile::~OutputFile() { ::close(fd_); }

void OutputFile::append(BytesView data, const Written& written) {
  while (!data.empty()) {
    const std::size_t wanted = std::min(data.size(), kPartBytes);
    const ssize_t done = disk_.calls_.pwrite(fd_, data.data(), wanted, static_cast<off_t>(size_));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw_disk_error("write", path_, done == 0 ? ENOSPC : errno);
    const BytesView part = data.first(static_cast<std::size_t>(done));
    if (written) written(part);
    data = data.subspan(part.size());
    size_ += part.size();
    if (size_ - handed_over_ >= kHandOverBytes) {
      // A hint only: its failures show in sync().
      ::sync_file_range(fd_, static_cast<off64_t>(handed_over_), static_cast<off64_t>(size_ - handed_over_),
                        SYNC_FILE_RANGE_WRITE);
      handed_over_ = size_;
    }
  }
}

void OutputFile::sync() {
  if (disk_.calls_.fsync(fd_) != 0) throw_disk_error("sync", path_, errno);
}

InputFile::InputFile(const Disk& disk, std::string path, int fd)
    : disk_(disk), path_(std::move(path)), fd_(fd) {}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read(std::uint64_t offset, std::uint64_t size,
                     const std::function<void(BytesView)>& use) const {
  Bytes buffer(std::min<std::uint64_t>(size, kPartBytes));
  while (size > 0) {
    const std::size_t wanted = std::min<std::uint64_t>(size, buffer.size());
    const ssize_t done = disk_.calls_.pread(fd_, buffer.data(), wanted, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_disk_error("read", path_, errno);
    if (done == 0) return;
    use(BytesView(buffer).first(static_cast<std::size_t>(done)));
    offset += static_cast<std::uint64_t>(done);
    size -= static_cast<std::uint64_t>(done);
  }
}

std::unique_ptr<InputFile> Disk::open(const std::string& path) const {
  const int fd = calls_.open(path.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) throw_disk_error("open", path, errno);
  std::unique_ptr<InputFile> file(new InputFile(*this, path, fd));
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_disk_error("open", path, errno);
  file->size_ = static_cast<std::uint64_t>(status.st_size);
  return file;
}

std::unique_ptr<OutputFile> Disk::create(const std::string& path) const {
  const int fd = calls_.open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) throw_disk_error("create", path, errno);
  return std::unique_ptr<OutputFile>(new OutputFile(*this, path, fd));
}

void Disk::write_file(const std::string& path, std::string_view text) const {
  const auto file = create(path);
  file->append(std::as_bytes(std::span(text)));
  file->sync();
}

void Disk::replace_file(const std::string& path, std::string_view text) const {
  const std::string temporary = path + ".partial";
  auto file = create(temporary);  // if this throws, then the path is not this call's
  try {
    file->append(std::as_bytes(std::span(text)));
    file->sync();
    file.reset();
    rename(temporary, path);
  } catch (...) {
    discard(&Disk::remove_file, temporary);
    throw;
  }
}

std::string Disk::read_file(const std::string& path, std::uint64_t most_bytes) const {
  const auto file = open(path);
  if (file->size() > most_bytes)
    throw_invalid("'{}' has {} bytes; at most {} are allowed", path, file->size(), most_bytes);
  std::string text;
  text.reserve(file->size());
  file->read(0, file->size(),
             [&](BytesView part) { text.append(reinterpret_cast<const char*>(part.data()), part.size()); });
  return text;
}

std::int64_t Disk::file_size(const std::string& path) const {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return -1;
  return status.st_size;
}

void Disk::check_writable(const std::string& path) const {
  std::error_code error;
  std::filesystem::path existing = std::filesystem::absolute(path, error);
  while (existing.has_relative_path() && !std::filesystem::exists(existing, error))
    existing = existing.parent_path();
  if (!std::filesystem::is_directory(existing, error)) throw_disk_error("write to", path, ENOTDIR);
  if (calls_.access(existing.c_str(), W_OK | X_OK) != 0) throw_disk_error("write to", path, errno);
}

void Disk::make_folder(const std::string& path) const {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw_disk_error("create the directory", path, error.value());
}

void Disk::sync_folder(const std::string& path) const {
  const OpenFile folder(calls_.open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (folder.fd < 0) throw_disk_error("open", path, errno);
  // Some file systems cannot sync folders and say so with EINVAL.
  if (calls_.fsync(folder.fd) != 0 && errno != EINVAL) throw_disk_error("sync", path, errno);
}

void Disk::rename(const std::string& from, const std::string& to) const {
  if (calls_.rename(from.c_str(), to.c_str()) != 0) throw_disk_error("rename to", to, errno);
  sync_folder(parent_of(to));
}

void Disk::remove(const std::string& path) const {
  std::error_code error;
  calls_.remove_all(path.c_str(), error);
  if (error && error != std::errc::not_a_directory) throw_disk_error("remove", path, error.value());
}

void Disk::remove_file(const std::string& path) const {
  if (calls_.unlink(path.c_str()) != 0 && errno != ENOENT) throw_disk_error("remove", path, errno);
}

void Disk::discard(Removal removal, const std::string& path) const noexcept {
  try {
    (this->*removal)(path);
  } catch (const std::exception&) {
    return;  // what is left may be removed later
  }
}

std::vector<std::string> Disk::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
    names.push_back(at->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory) throw_disk_error("list", path, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace torchspan::checkpoint
