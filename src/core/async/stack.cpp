#include "core/async/stack.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <memory>
#include <string_view>

namespace torchspan {
namespace {

constexpr int kMostFrames = 24;

std::string name_of(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return fmt::format("{}", address);
  if (info.dli_sname != nullptr) {
    int status = 0;
    std::unique_ptr<char, void (*)(void*)> name(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
    return status == 0 ? name.get() : info.dli_sname;
  }
  const auto offset =
      reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  const std::string_view path = info.dli_fname;
  return fmt::format("{}+{:#x}", path.substr(path.rfind('/') + 1), offset);
}

}  // namespace

std::string stack_of_this_thread() {
  std::array<void*, kMostFrames> frames{};
  const int count = backtrace(frames.data(), kMostFrames);
  std::string text;
  for (int i = 1; i < count; ++i) text += fmt::format("      {}\n", name_of(frames[i]));
  return text;
}

}  // namespace torchspan
