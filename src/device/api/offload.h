#pragma once
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/device/streams.h>

namespace torchspan::device {

class Offloader;

/// A tensor of a device whose contents wait in host memory. Used by the thread of its Offloader, which may be destroyed
/// earlier.
class OffloadedTensor {
 public:
  /// Waits for copies that still use the host memory.
  ~OffloadedTensor();
  OffloadedTensor(OffloadedTensor&&) noexcept;
  OffloadedTensor& operator=(OffloadedTensor&&) = delete;

  /// Begins the copy back to the device, beside the work of other streams.
  void prefetch();
  /// Returns the tensor on its device, for this thread's current stream; once. Does not wait on the host.
  at::Tensor take();

 private:
  friend class Offloader;
  struct State;
  explicit OffloadedTensor(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Moves tensors of devices with streams to host memory, pinned if possible, and back, on two streams per device that
/// only these copies use. Used by one thread.
class Offloader {
 public:
  Offloader();
  ~Offloader();
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  /// Copies the contents that `tensor` has after the work of this thread's current stream so far. Nothing may change
  /// the tensor afterwards. Its memory is free soon: at most two tensors wait for their copies; with a third one, the
  /// host waits for the first of them.
  OffloadedTensor offload(at::Tensor tensor);

 private:
  friend class OffloadedTensor;
  class Copies;
  const std::shared_ptr<Copies> copies_;
};

}  // namespace torchspan::device
