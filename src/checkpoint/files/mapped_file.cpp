#include "checkpoint/files/mapped_file.h"

#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "checkpoint/files/disk.h"

namespace torchspan::checkpoint {
namespace {

std::string safetensors_file(const std::string& path) { return fmt::format("safetensors file '{}'", path); }

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_disk_error("open", path_, errno);
  struct stat status {};
  void* mapped = MAP_FAILED;
  int failure = 0;
  if (::fstat(fd, &status) != 0) {
    failure = errno;
  } else if (!S_ISREG(status.st_mode)) {
    failure = EISDIR;
  } else if (status.st_size > 0) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    device_ = status.st_dev;
    inode_ = status.st_ino;
    mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) failure = errno;
  }
  ::close(fd);
  if (failure != 0) throw_disk_error("map", path_, failure);
  if (mapped == MAP_FAILED) throw_invalid(safetensors_file(path_) + ": the file is empty");
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, size_, MADV_SEQUENTIAL);
  try {
    header_ = parse_header({data_, size_}, size_, safetensors_file(path_));
  } catch (...) {
    ::munmap(mapped, size_);
    throw;
  }
  for (const HeaderEntry& entry : header_.entries) by_name_.emplace(entry.name, &entry);
}

MappedFile::~MappedFile() { ::munmap(data_, size_); }

Buffer MappedFile::map_again(BytesView part) const {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<std::size_t>(part.data() - data_);
  const std::size_t begin = offset / page * page;
  const std::size_t length = offset - begin + part.size();
  struct stat status {};
  void* mapped = MAP_FAILED;
  if (::fstat(fd, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) {
    mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
                    static_cast<off_t>(begin));
  }
  ::close(fd);
  if (mapped == MAP_FAILED) return {};
  std::shared_ptr<void> owner(mapped, [length](void* memory) { ::munmap(memory, length); });
  return {static_cast<std::byte*>(mapped) + (offset - begin), part.size(), std::move(owner)};
}

const HeaderEntry* MappedFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

}  // namespace torchspan::checkpoint
