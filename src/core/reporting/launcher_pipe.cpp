#include "core/api/launcher_pipe.h"

#include <charconv>
#include <cstdlib>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>

namespace torchspan {

int launcher_pipe() {
  const char* text = std::getenv("TORCHSPAN_PROGRESS_FD");
  if (text == nullptr) return -1;
  const std::string_view number = text;
  int descriptor = -1;
  const auto result = std::from_chars(number.data(), number.data() + number.size(), descriptor);
  struct stat status {};
  const bool is_pipe = result.ec == std::errc() && result.ptr == number.data() + number.size() &&
                       descriptor > 2 && fstat(descriptor, &status) == 0 && S_ISFIFO(status.st_mode);
  if (!is_pipe) return -1;
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

}  // namespace torchspan
