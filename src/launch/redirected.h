#pragma once
#include <cstdio>
#include <fcntl.h>
#include <string>
#include <unistd.h>

namespace torchspan::launch {

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
