#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <torchspan/core/bytes.h>

namespace torchspan::device {

/// What a device has beyond LibTorch's generic streams and events: its own handles, and memory that processes of
/// one host share. One implementation per kind of device; tests have another. Thread-safe. Errors are
/// Error{kUnsupported, kOverloaded, kInvalid} with the device.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// The kind of devices that this is for.
  virtual c10::DeviceType type() const = 0;
  /// The stream's handle in the device's own interface, such as cudaStream_t.
  virtual void* native_stream(const c10::Stream& stream) const = 0;
  /// Names the physical device: equal for two ranks if and only if they share it.
  virtual std::string identity(c10::Device device) const = 0;
  /// Memory outside of LibTorch's allocator that other processes may map. The last copy of the pointer frees it. If the
  /// device has no room, LibTorch's allocator first returns what it does not use.
  virtual std::shared_ptr<std::byte> allocate(c10::Device device, std::size_t bytes) const = 0;
  /// A handle by which another process of this host maps all of an allocation of `device`.
  virtual Bytes export_memory(c10::Device device, const std::byte* allocation) const = 0;
  /// Maps another process's allocation of `bytes` bytes; the last copy of the pointer unmaps it. Throws
  /// Error{kInvalid} if the allocation is smaller.
  virtual std::shared_ptr<std::byte> open_memory(c10::Device device, BytesView handle,
                                                 std::size_t bytes) const = 0;
};

/// The runtime of CUDA devices; null if this library was built without TORCHSPAN_CUDA.
std::shared_ptr<const DeviceRuntime> cuda_device_runtime();

}  // namespace torchspan::device
