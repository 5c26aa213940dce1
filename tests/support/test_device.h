#pragma once
// The devices of tests that can run on real ones: stand-ins (stand_in_device.h) or, with TORCHSPAN_TEST_DEVICE=cuda,
// CUDA devices, which report no races. There, work that other streams must wait for begins with a delay, so that a
// missing wait gives wrong values.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/cuda.h>

#include <torchspan/detail/device/streams.h>

#include "device/api/device_runtime.h"
#include "tests/support/on_cuda.h"
#include "tests/support/stand_in_device.h"
#include "tests/support/stand_in_runtime.h"

namespace torchspan::testing {

inline int test_device_count() {
  const c10::DeviceType type = on_cuda() ? c10::kCUDA : c10::DeviceType::PrivateUse1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
}

inline c10::Device test_device(int index) {
  if (index >= test_device_count())
    throw std::runtime_error("the test needs device " + std::to_string(index) + ", and there are " +
                             std::to_string(test_device_count()));
  return on_cuda() ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)) : stand_in(index);
}

/// The same, or the first device if there is only one: for tests whose devices may coincide.
inline c10::Device test_device_or_first(int index) {
  return test_device(index < test_device_count() ? index : 0);
}

/// Keeps a CUDA device's stream busy for some milliseconds. No effect on stand-ins, which find races without it.
inline void keep_busy(const c10::Stream& stream) {
  if (stream.device_type() != c10::kCUDA) return;
  const c10::StreamGuard guard(stream);
  at::Tensor work = at::zeros({2048, 2048}, at::TensorOptions(at::kDouble).device(stream.device()));
  for (int i = 0; i < 4; ++i) work = at::matmul(work, work);
}

/// The checker of the devices' accesses: that of the stand-ins, or none.
class TestDevices {
 public:
  /// Forgets what was found. Stand-ins then call work unfinished for `polls` questions.
  static void reset(int polls = 0) {
    if (on_cuda()) {
      torch::cuda::synchronize();
    } else {
      StandInStreams::get().reset(polls);
    }
  }
  static std::vector<std::string> take_races() {
    return on_cuda() ? std::vector<std::string>() : StandInStreams::get().take_races();
  }
  static void synchronize() {
    if (on_cuda()) return torch::cuda::synchronize();
    for (int device = 0; device < 2; ++device) StandInStreams::get().synchronize_device(device);
  }
  /// Why a test cannot run on these devices; empty if it can. It may need several of them, or the counts, the
  /// unfinished work and the memory of stand-ins.
  static std::string missing(int devices, bool needs_stand_ins = false) {
    if (on_cuda() && needs_stand_ins) return "the test needs what only stand-in devices have";
    if (test_device_count() < devices)
      return "the test needs " + std::to_string(devices) + " devices, and there are " +
             std::to_string(test_device_count());
    return {};
  }
};

/// The runtime of these devices.
inline std::shared_ptr<const device::DeviceRuntime> test_runtime() {
  if (!on_cuda()) return std::make_shared<StandInRuntime>();
  auto runtime = device::cuda_device_runtime();
  if (!runtime) throw std::runtime_error("TORCHSPAN_TEST_DEVICE is cuda: configure with TORCHSPAN_CUDA=ON");
  return runtime;
}

}  // namespace torchspan::testing
