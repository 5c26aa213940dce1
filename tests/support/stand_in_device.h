#pragma once
// Two simulated devices that every machine has, to test tensors on devices other than the CPU: LibTorch's key
// for external backends, over ordinary memory. Operators run the CPU's kernels on that memory, at once, and
// report their accesses to stand_in_streams.h; an operator that reads what no stream order makes ready gets NaN.
// The devices register themselves in every program that includes this header.
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 7)
#define TORCHSPAN_STAND_IN_IS_ACCELERATOR
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif

#include "tests/support/on_cuda.h"
#include "tests/support/stand_in_streams.h"

namespace torchspan::testing::stand_in_detail {

inline Lane lane_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
inline c10::Stream stream_of(Lane lane) {
  return c10::Stream(c10::Stream::UNSAFE, stand_in(lane.first), lane.second);
}

using BlockPtr = std::shared_ptr<DeviceBlock>;

inline void free_block(void* context) {
  const std::unique_ptr<BlockPtr> block(static_cast<BlockPtr*>(context));
  StandInStreams::get().freed(**block);
}
inline DeviceBlock* block_of(const c10::DataPtr& memory) {
  if (memory.get_deleter() != &free_block) return nullptr;
  return static_cast<BlockPtr*>(memory.get_context())->get();
}

/// Devices and streams of the calling thread, and events.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return stand_in(std::exchange(device_of_thread(), device.index()));
  }
  c10::Device getDevice() const override { return stand_in(device_of_thread()); }
  void setDevice(c10::Device device) const override { device_of_thread() = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread() = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream_of(CurrentLanes::get(device.has_index() ? device.index() : device_of_thread()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream_of(CurrentLanes::exchange(lane_of(stream)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({device.index(), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(StandInStreams::get().fresh(device.index()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return StandInStreams::get().query(lane_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    StandInStreams::get().synchronize(lane_of(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    expect_current(stream.device_index());
    *event = StandInStreams::get().record(static_cast<DeviceEvent*>(*event), lane_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    expect_current(stream.device_index());
    if (event != nullptr) StandInStreams::get().block(*static_cast<DeviceEvent*>(event), lane_of(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || StandInStreams::get().query(*static_cast<DeviceEvent*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    expect_current(device);
    delete static_cast<DeviceEvent*>(event);
  }
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6)
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) StandInStreams::get().synchronize(*static_cast<DeviceEvent*>(event));
  }
#endif
#ifdef TORCHSPAN_STAND_IN_IS_ACCELERATOR
  void synchronizeDevice(c10::DeviceIndex device) const override {
    StandInStreams::get().synchronize_device(device);
  }
#endif
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (stream.device_index() != memory.device().index())
      throw std::logic_error("memory of one device was recorded on a stream of another");
    if (DeviceBlock* block = block_of(memory)) StandInStreams::get().keep_for(*block, lane_of(stream));
  }

 private:
  static void expect_current(c10::DeviceIndex device) {
    if (device_of_thread() != device) StandInStreams::get().count_stray_event_call();
  }
  static c10::DeviceIndex& device_of_thread() {
    thread_local c10::DeviceIndex the_device = 0;
    return the_device;
  }
};

inline c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : Guard().getDevice();
}

inline std::size_t span_of(at::IntArrayRef sizes, at::IntArrayRef strides, std::size_t element) {
  std::size_t last = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += static_cast<std::size_t>((sizes[i] - 1) * strides[i]);
  }
  return (last + 1) * element;
}

inline at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device) {
  device = with_index(device);
  const std::size_t bytes = span_of(sizes, strides, c10::elementSize(dtype));
  StandInStreams::get().check_room(bytes);
  auto block =
      std::make_unique<BlockPtr>(std::make_shared<DeviceBlock>(bytes, CurrentLanes::get(device.index())));
  void* memory = (*block)->memory.data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(memory, block.release(), &free_block, device), nullptr,
                       /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                                c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                                c10::optional<at::Device> device, c10::optional<bool>) {
  return make(sizes, strides, dtype.value_or(at::kFloat), device.value_or(Guard().getDevice()));
}

inline at::Tensor empty(at::IntArrayRef sizes, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                        c10::optional<at::Device> device, c10::optional<bool>,
                        c10::optional<at::MemoryFormat>) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  return make(sizes, strides, dtype.value_or(at::kFloat), device.value_or(Guard().getDevice()));
}

inline bool is_stand_in(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == Guard::static_type;
}

/// The same memory, seen from the CPU; resize_() moves it to other memory.
inline at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_stand_in(tensor)) return tensor;
  const c10::Storage& storage = tensor.storage();
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                   c10::DataPtr(const_cast<void*>(storage.data_ptr().get()), c10::Device(c10::kCPU)),
                   c10::GetCPUAllocator(), /*resizable=*/true),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

/// What memory shows before its contents are ready.
inline void poison(const at::Tensor& cpu) {
  if (c10::isFloatingType(cpu.scalar_type()) || c10::isComplexType(cpu.scalar_type())) {
    cpu.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    cpu.fill_(cpu.scalar_type() == at::kBool ? 1 : 0x55);
  }
}

struct Bytes {
  std::size_t begin = 0, end = 0;
};
inline Bytes bytes_of(const at::Tensor& tensor) {
  const std::size_t begin = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  return {begin, begin + span_of(tensor.sizes(), tensor.strides(), tensor.element_size())};
}

/// A tensor as an operation sees it on the CPU. A read that is a race sees NaN.
inline at::Tensor read_by(const DeviceOperation& operation, const at::Tensor& tensor) {
  at::Tensor alias = on_cpu(tensor);
  DeviceBlock* block = block_of(tensor.storage().data_ptr());
  const Bytes bytes = bytes_of(tensor);
  if (block == nullptr || operation.reads(*block, bytes.begin, bytes.end)) return alias;
  alias = alias.clone();
  poison(alias);
  return alias;
}
inline at::Tensor written_by(const DeviceOperation& operation, const at::Tensor& tensor) {
  const Bytes bytes = bytes_of(tensor);
  if (DeviceBlock* block = block_of(tensor.storage().data_ptr()))
    operation.writes(*block, bytes.begin, bytes.end);
  return on_cpu(tensor);
}

/// Host memory that a copy uses late. The program must keep it until then, as with real devices.
struct HostMemory {
  explicit HostMemory(const at::Tensor& tensor)
      : storage(tensor.storage().getWeakStorageImpl()),
        alias_of(tensor.dtype()),
        offset(tensor.storage_offset()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()) {}
  /// Undefined if it was freed.
  at::Tensor tensor() const {
    auto alive = storage.lock();
    if (!alive) return {};
    at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(alive)), c10::DispatchKeySet(c10::DispatchKey::CPU), alias_of);
    alias.unsafeGetTensorImpl()->set_storage_offset(offset);
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return alias;
  }
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  caffe2::TypeMeta alias_of;
  std::int64_t offset;
  std::vector<std::int64_t> sizes, strides;
};

/// Whether a tensor is in memory outside of these devices' allocator, which other processes may map.
inline bool is_shared(const at::Tensor& tensor) { return block_of(tensor.storage().data_ptr()) == nullptr; }

/// Copies between `host` and `device` when the operation's stream is known to have come to it. The program must keep
/// shared memory until then.
inline void copy_late(const DeviceOperation& operation, const at::Tensor& host, const at::Tensor& device,
                      bool to_host) {
  BlockPtr block;
  if (!is_shared(device)) block = *static_cast<BlockPtr*>(device.storage().data_ptr().get_context());
  operation.later([memory = HostMemory(host), alias = on_cpu(device), block, to_host] {
    const at::Tensor there = memory.tensor();
    if (!there.defined()) {
      return DeviceOperation::report(StandInStreams::get(),
                                     "host memory of an asynchronous copy was freed before the copy ran");
    }
    to_host ? there.copy_(alias) : alias.copy_(there);
  });
}

/// Copies from or to memory that processes share when the stream is known to have come to the copy: who reads the
/// target too early sees NaN, and who overwrites the source too early changes what is copied.
inline void copy_shared_late(const DeviceOperation& operation, const at::Tensor& self,
                             const at::Tensor& written, const at::Tensor& source, const at::Tensor& read) {
  std::vector<BlockPtr> kept;
  for (const at::Tensor& tensor : {self, source}) {
    if (!is_shared(tensor))
      kept.push_back(*static_cast<BlockPtr*>(tensor.storage().data_ptr().get_context()));
  }
  poison(written);
  operation.later([written, read, kept] { written.copy_(read); });
}

inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool from_host = !is_stand_in(source), to_host = !is_stand_in(self);
  const Lane lane = CurrentLanes::get((from_host ? self : source).device().index());
  DeviceOperation operation(StandInStreams::get(), lane, "copy_");
  if (!from_host && !to_host) {
    const Lane other = CurrentLanes::get(self.device().index());
    operation.comes_after(other);
    const at::Tensor read = read_by(operation, source);
    const at::Tensor written = written_by(operation, self);
    is_shared(self) || is_shared(source) ? copy_shared_late(operation, self, written, source, read)
                                         : static_cast<void>(written.copy_(read));
    operation.comes_before(other);
    return self;
  }
  if (from_host) written_by(operation, self);
  const at::Tensor read = from_host ? source : read_by(operation, source);
  const bool raced = !from_host && read.data_ptr() != source.data_ptr();
  if (!non_blocking || raced) {
    on_cpu(self).copy_(read);
    if (!non_blocking) operation.wait_on_host();
    return self;
  }
  poison(on_cpu(self));
  copy_late(operation, from_host ? source : self, from_host ? self : source, to_host);
  return self;
}

/// Runs an operator's CPU kernel on device memory.
class CpuKernel {
 public:
  CpuKernel(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        stack_(stack),
        given_(torch::jit::last(stack, op.schema().arguments().size()).vec()),
        device_(device_of_arguments()) {}

  void run() {
    {
      const DeviceOperation operation(StandInStreams::get(), CurrentLanes::get(device_.index()),
                                      op_.schema().operator_name().name);
      torch::jit::Stack stack;
      for (std::size_t i = 0; i < given_.size(); ++i) {
        const auto* alias = op_.schema().arguments()[i].alias_info();
        stack.push_back(on_cpu(operation, given_[i], alias != nullptr && alias->isWrite()));
      }
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      results_ = std::move(stack);
      if (reads_back()) operation.wait_on_host();
    }
    for (auto& [device, cpu] : written_) follow(device, cpu);
    torch::jit::drop(stack_, given_.size());
    const auto& returns = op_.schema().returns();
    for (std::size_t i = 0; i < returns.size(); ++i) stack_.push_back(returned(returns[i], results_[i]));
  }

 private:
  c10::Device device_of_arguments() const {
    for (const c10::IValue& value : given_) {
      if (value.isTensor() && is_stand_in(value.toTensor())) return value.toTensor().device();
      if (value.isTensorList()) {
        for (const at::Tensor& one : value.toTensorVector()) {
          if (is_stand_in(one)) return one.device();
        }
      }
      if (value.isDevice()) return with_index(value.toDevice());
    }
    return Guard().getDevice();
  }

  at::Tensor on_cpu(const DeviceOperation& operation, const at::Tensor& tensor, bool writes) {
    if (!is_stand_in(tensor)) return tensor;
    const at::Tensor cpu = writes ? written_by(operation, tensor) : read_by(operation, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
    (writes ? written_ : read_).emplace_back(tensor, cpu);
    return cpu;
  }
  c10::IValue on_cpu(const DeviceOperation& operation, const c10::IValue& value, bool writes) {
    if (value.isTensor()) return on_cpu(operation, value.toTensor(), writes);
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      std::vector<at::Tensor> cpu;
      for (const at::Tensor& one : value.toTensorVector()) cpu.push_back(on_cpu(operation, one, writes));
      return cpu;
    }
    if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> cpu;
      for (const c10::optional<at::Tensor>& one : value.toOptionalTensorVector())
        cpu.push_back(one ? c10::optional<at::Tensor>(on_cpu(operation, *one, writes))
                          : c10::optional<at::Tensor>());
      return cpu;
    }
    return value;
  }

  /// Whether the host learns values from the operator.
  bool reads_back() const {
    const auto& returns = op_.schema().returns();
    for (std::size_t i = 0; i < returns.size(); ++i) {
      if (!results_[i].isTensor() && !results_[i].isTensorList()) return true;
    }
    return op_.schema().name() == "aten::nonzero" || op_.schema().name() == "aten::masked_select";
  }

  /// Gives a device tensor the memory and shape that the kernel gave its alias.
  void follow(const at::Tensor& device, const at::Tensor& cpu) const {
    auto* tensor = device.unsafeGetTensorImpl();
    if (cpu.storage().data_ptr().get() != device.storage().data_ptr().get()) {
      tensor->set_storage_keep_dtype(on_device(cpu).storage());
    }
    if (cpu.sizes() != device.sizes() || cpu.strides() != device.strides())
      tensor->set_sizes_and_strides(cpu.sizes(), cpu.strides());
  }

  /// A result: an alias of an argument, or in new memory.
  at::Tensor on_device(const at::Tensor& cpu) const {
    if (!cpu.defined()) return cpu;
    for (const auto* list : {&written_, &read_}) {
      for (const auto& [device, alias] : *list) {
        if (cpu.storage().data_ptr().get() != device.storage().data_ptr().get() || cpu.nbytes() == 0)
          continue;
        at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(device.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
        return view;
      }
    }
    at::Tensor fresh = make(cpu.sizes(), cpu.strides(), cpu.scalar_type(), device_);
    const DeviceOperation operation(StandInStreams::get(), CurrentLanes::get(device_.index()),
                                    op_.schema().operator_name().name);
    written_by(operation, fresh).copy_(cpu);
    return fresh;
  }

  c10::IValue returned(const c10::Argument& what, const c10::IValue& value) const {
    if (const auto* alias = what.alias_info(); alias != nullptr && alias->isWrite()) {
      for (std::size_t i = 0; i < given_.size(); ++i) {
        const auto* argument = op_.schema().arguments()[i].alias_info();
        if (argument != nullptr && *argument == *alias) return given_[i];
      }
    }
    if (value.isTensor()) return on_device(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& one : value.toTensorVector()) tensors.push_back(on_device(one));
    return tensors;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::vector<c10::IValue> given_;
  const c10::Device device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_, read_;  // device tensors, and their aliases
  torch::jit::Stack results_;
};

inline void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CpuKernel(op, *stack).run();
}

#ifdef TORCHSPAN_STAND_IN_IS_ACCELERATOR
/// LibTorch's engine asks the accelerator of the process for streams: the registered backend, else CUDA.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  /// torch::manual_seed() seeds it, too.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators_.at(static_cast<std::size_t>(index));
  }

 private:
  const std::array<at::Generator, 2> generators_{at::make_generator<at::CPUGeneratorImpl>(),
                                                 at::make_generator<at::CPUGeneratorImpl>()};
};
#endif

/// Registers devices and operators, once for each program.
class Registration {
 public:
  Registration()
      : guard_(Guard::static_type, new Guard()),
        all_(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__),
        aten_(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__) {
#ifdef TORCHSPAN_STAND_IN_IS_ACCELERATOR
    // LibTorch's engine orders the streams of one kind of device: this one, once it is registered.
    if (!on_cuda()) {
      c10::register_privateuse1_backend("privateuseone");
      at::RegisterPrivateUse1HooksInterface(hooks_.get());
    }
#endif
    all_.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
    aten_.impl("empty.memory_format", &empty);
    aten_.impl("empty_strided", &empty_strided);
    aten_.impl("copy_", &copy);
    aten_.impl("as_strided", &at::native::as_strided_tensorimpl);
    aten_.impl("view", &at::native::view);
  }

 private:
  c10::impl::DeviceGuardImplRegistrar guard_;
  torch::Library all_, aten_;
#ifdef TORCHSPAN_STAND_IN_IS_ACCELERATOR
  const std::unique_ptr<Hooks> hooks_ = std::make_unique<Hooks>();
#endif
};
inline const Registration kRegistration;

}  // namespace torchspan::testing::stand_in_detail
