// The only source that uses CUDA's own interface. Built with it if TORCHSPAN_CUDA found a toolkit.
#include "core/api/throw_invalid.h"
#include "device/api/device_runtime.h"

#if defined(TORCHSPAN_CUDA_RUNTIME)
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <optional>

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <torchspan/core/error.h>
#endif

namespace torchspan::device {

#if defined(TORCHSPAN_CUDA_RUNTIME)
namespace {

void check(cudaError_t result, c10::Device device, const char* call) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // otherwise LibTorch's next call reports it
  const bool full = result == cudaErrorMemoryAllocation;
  throw Error(full ? ErrorKind::kOverloaded : ErrorKind::kUnsupported,
              fmt::format("{} on {} failed: {} ({})", call, device.str(), cudaGetErrorString(result),
                          cudaGetErrorName(result)));
}

/// Releases memory in a destructor, also after the device has failed.
template <class F>
void release_on(c10::Device device, const F& release) noexcept {
  try {
    const c10::DeviceGuard guard(device);
    if (release() != cudaSuccess) static_cast<void>(cudaGetLastError());
  } catch (const std::exception&) {  // nothing can be released any more
  }
}

/// The runtime carves small allocations out of blocks of this size, and a handle names a whole block.
constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

/// The size of the allocation at `memory`, if the driver can report it. The runtime's interface cannot.
std::optional<std::size_t> allocation_size(void* memory) {
  using GetRange = int (*)(unsigned long long* base, std::size_t* size, unsigned long long address);
  const std::unique_ptr<void, int (*)(void*)> driver(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD),
                                                     &dlclose);
  if (!driver) return std::nullopt;
  const auto get_range = reinterpret_cast<GetRange>(dlsym(driver.get(), "cuMemGetAddressRange_v2"));
  unsigned long long base = 0;
  std::size_t size = 0;
  const auto address = static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(memory));
  if (get_range == nullptr || get_range(&base, &size, address) != 0) return std::nullopt;
  return static_cast<std::size_t>(base + size - address);
}

/// The memory that LibTorch's allocator keeps and does not use.
std::size_t unused_by_libtorch(c10::Device device) {
  try {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    return static_cast<std::size_t>(stats.reserved_bytes[0].current - stats.allocated_bytes[0].current);
  } catch (const std::exception&) {  // it has not been used on this device
    return 0;
  }
}

class CudaRuntime final : public DeviceRuntime {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }

  void* native_stream(const c10::Stream& stream) const override {
    return c10::cuda::CUDAStream(stream).stream();
  }

  std::string identity(c10::Device device) const override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.index()), device, "cudaGetDeviceProperties");
    std::string text;
    for (const char byte : properties.uuid.bytes)
      text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  }

  std::shared_ptr<std::byte> allocate(c10::Device device, std::size_t bytes) const override {
    const c10::DeviceGuard guard(device);
    void* memory = nullptr;
    const std::size_t size = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    cudaError_t result = cudaMalloc(&memory, size);
    if (result == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      if (unused_by_libtorch(device) >= size) {
        c10::cuda::CUDACachingAllocator::emptyCache();
        result = cudaMalloc(&memory, size);
      }
    }
    check(result, device, "cudaMalloc");
    return {static_cast<std::byte*>(memory),
            [device](std::byte* data) { release_on(device, [data] { return cudaFree(data); }); }};
  }

  Bytes export_memory(c10::Device device, const std::byte* allocation) const override {
    cudaIpcMemHandle_t handle{};
    const c10::DeviceGuard guard(device);
    check(cudaIpcGetMemHandle(&handle, const_cast<std::byte*>(allocation)), device, "cudaIpcGetMemHandle");
    Bytes bytes(sizeof handle);
    std::memcpy(bytes.data(), &handle, sizeof handle);
    return bytes;
  }

  std::shared_ptr<std::byte> open_memory(c10::Device device, BytesView handle,
                                         std::size_t bytes) const override {
    cudaIpcMemHandle_t theirs{};
    if (handle.size() != sizeof theirs) {
      throw_invalid("a handle of CUDA memory has {} bytes, but a rank sent {}", sizeof theirs, handle.size());
    }
    std::memcpy(&theirs, handle.data(), sizeof theirs);
    const c10::DeviceGuard guard(device);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, theirs, cudaIpcMemLazyEnablePeerAccess), device,
          "cudaIpcOpenMemHandle");
    std::shared_ptr<std::byte> opened(static_cast<std::byte*>(memory), [device](std::byte* data) {
      release_on(device, [data] { return cudaIpcCloseMemHandle(data); });
    });
    const std::optional<std::size_t> size = allocation_size(memory);
    if (size && *size < bytes) {
      throw_invalid("a rank shared {} bytes of {} memory and says that they are {}", *size, device.str(),
                    bytes);
    }
    return opened;
  }
};

}  // namespace

std::shared_ptr<const DeviceRuntime> cuda_device_runtime() { return std::make_shared<const CudaRuntime>(); }
#else
std::shared_ptr<const DeviceRuntime> cuda_device_runtime() { return nullptr; }
#endif

}  // namespace torchspan::device
