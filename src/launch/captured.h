#pragma once
#include <cstdio>
#include <fcntl.h>
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

/// For tests: redirects a standard stream of this process to a new file, as a shell does with "> PATH". The destructor
/// restores the stream.
class Redirected {
 public:
  Redirected(int stream, const std::string& path) : stream_(stream) {
    std::fflush(nullptr);
    before_ = dup(stream_);
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dup2(file, stream_);
    close(file);
  }
  ~Redirected() {
    std::fflush(nullptr);
    dup2(before_, stream_);
    close(before_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

  void write(const std::string& text) const {
    [[maybe_unused]] const auto size = ::write(stream_, text.data(), text.size());
  }

 private:
  const int stream_;
  int before_ = -1;
};

}  // namespace torchspan::launch
