#pragma once
#include <cstdlib>
#include <string_view>

namespace torchspan::testing {

/// Whether the tests of test_device.h run on CUDA devices instead of stand-ins.
inline bool on_cuda() {
  const char* device = std::getenv("TORCHSPAN_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

}  // namespace torchspan::testing
