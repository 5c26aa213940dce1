#pragma once
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace torchspan::launch {

/// For tests: a descriptor that records what is written to it.
class Captured {
 public:
  Captured() : descriptor_(memfd_create("captured", MFD_CLOEXEC)) {}
  ~Captured() { close(descriptor_); }
  Captured(const Captured&) = delete;
  int descriptor() const { return descriptor_; }
  std::string text() const {
    struct stat status {};
    fstat(descriptor_, &status);  // lseek() would move the position at which other processes write
    std::string all(static_cast<std::size_t>(status.st_size), '\0');
    all.resize(static_cast<std::size_t>(pread(descriptor_, all.data(), all.size(), 0)));
    return all;
  }

 private:
  int descriptor_;
};

}  // namespace torchspan::launch
