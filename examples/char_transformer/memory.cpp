#include "char_transformer/memory.h"

#include <fstream>
#include <string>
#include <sys/resource.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace char_transformer {
namespace {

/// A number of /proc/self/status, in MiB.
std::int64_t status_mib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) / 1024;
  }
  return 0;
}

}  // namespace

void limit_memory(std::int64_t mib) {
  if (mib == 0) return;
  // OpenBLAS allocates a buffer of 128 MiB once, and retries without end if it cannot.
  at::mm(at::ones({512, 512}), at::ones({512, 512}));
  const auto bytes = static_cast<rlim_t>(status_mib("VmData") + mib) << 20;
  const rlimit limit{bytes, bytes};
  if (setrlimit(RLIMIT_DATA, &limit) == 0) return;
  throw torchspan::Error(torchspan::ErrorKind::kUnsupported,
                         "this system does not limit the memory of a process; omit --memory");
}

std::int64_t largest_memory() { return status_mib("VmHWM"); }

}  // namespace char_transformer
