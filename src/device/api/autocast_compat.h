#pragma once
// Autocast of all supported LibTorch versions. Includes all of ATen.
#include <ATen/core/ivalue.h>
#include <ATen/autocast_mode.h>

#include "device/api/torch_version.h"

namespace torchspan::device::compat {

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 4)
inline bool has_autocast(c10::DeviceType device) {
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA ||
         device == c10::DeviceType::XPU || device == c10::DeviceType::PrivateUse1;
}
inline bool autocast_enabled(c10::DeviceType device) { return at::autocast::is_autocast_enabled(device); }
inline void set_autocast_enabled(c10::DeviceType device, bool enabled) {
  at::autocast::set_autocast_enabled(device, enabled);
}
inline at::ScalarType autocast_dtype(c10::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}
inline void set_autocast_dtype(c10::DeviceType device, at::ScalarType dtype) {
  at::autocast::set_autocast_dtype(device, dtype);
}
#else
/// Before 2.4, each device type has functions with names that contain it.
inline bool has_autocast(c10::DeviceType device) {
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA || device == c10::DeviceType::XPU;
}
inline bool autocast_enabled(c10::DeviceType device) {
  if (device == c10::DeviceType::CUDA) return at::autocast::is_enabled();
  return device == c10::DeviceType::XPU ? at::autocast::is_xpu_enabled() : at::autocast::is_cpu_enabled();
}
inline void set_autocast_enabled(c10::DeviceType device, bool enabled) {
  if (device == c10::DeviceType::CUDA) return at::autocast::set_enabled(enabled);
  device == c10::DeviceType::XPU ? at::autocast::set_xpu_enabled(enabled)
                                 : at::autocast::set_cpu_enabled(enabled);
}
inline at::ScalarType autocast_dtype(c10::DeviceType device) {
  if (device == c10::DeviceType::CUDA) return at::autocast::get_autocast_gpu_dtype();
  return device == c10::DeviceType::XPU ? at::autocast::get_autocast_xpu_dtype()
                                        : at::autocast::get_autocast_cpu_dtype();
}
inline void set_autocast_dtype(c10::DeviceType device, at::ScalarType dtype) {
  if (device == c10::DeviceType::CUDA) return at::autocast::set_autocast_gpu_dtype(dtype);
  device == c10::DeviceType::XPU ? at::autocast::set_autocast_xpu_dtype(dtype)
                                 : at::autocast::set_autocast_cpu_dtype(dtype);
}
#endif

}  // namespace torchspan::device::compat
