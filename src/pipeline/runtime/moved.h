#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torchspan/detail/device/copies.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::pipeline {

/// Returns the tensor on `device`, for use on this thread's current stream. A copy from the host to a device with
/// streams runs beside the work that this stream already has; the host waits for the copy only.
inline at::Tensor moved(at::Tensor tensor, c10::Device device) {
  if (device::has_streams(tensor.device()))  // the thread that received it may have another current stream
    device::keep_memory_for(tensor, device::current_stream(tensor.device()));
  if (tensor.device() == device) return tensor;
  if (!tensor.is_cpu() || !device::has_streams(device)) return tensor.to(device);
  return device::CopyStreams().to_device(tensor, device);
}

}  // namespace torchspan::pipeline
