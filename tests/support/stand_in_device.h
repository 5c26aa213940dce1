#pragma once
// Two simulated devices that every machine has, to test tensors on devices other than the CPU: LibTorch's key
// for external backends, over ordinary memory. Operators copy to the CPU and back. Include this header in one
// source file of a test program: it registers itself.
#include <cstdlib>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace torchspan::testing {

inline c10::Device stand_in(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

namespace stand_in_detail {

/// Every thread's current device is the first one; there is one stream, and nothing is ever pending.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return stand_in(0); }
  c10::Device getDevice() const override { return stand_in(0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};

inline at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device) {
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) elements += (sizes[i] - 1) * strides[i];
  for (const std::int64_t size : sizes) elements = size == 0 ? 0 : elements;
  const std::size_t bytes = static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  void* memory = std::malloc(bytes + 1);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(memory, memory, &std::free, device), nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                                c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                                c10::optional<at::Device> device, c10::optional<bool>) {
  return make(sizes, strides, dtype.value_or(at::kFloat), device.value_or(stand_in(0)));
}

inline at::Tensor empty(at::IntArrayRef sizes, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                        c10::optional<at::Device> device, c10::optional<bool>,
                        c10::optional<at::MemoryFormat>) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return make(sizes, strides, dtype.value_or(at::kFloat), device.value_or(stand_in(0)));
}

/// The same memory, seen from the CPU.
inline at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

/// Brings the results of the fallback below back to the device.
inline at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& self) {
  if (self.sizes() != source.sizes()) {
    const at::Tensor fresh = empty(source.sizes(), self.scalar_type(), {}, self.device(), {}, {});
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
    self.unsafeGetTensorImpl()->set_sizes_contiguous(source.sizes());
  }
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

inline void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}
}  // namespace

}  // namespace stand_in_detail
}  // namespace torchspan::testing
