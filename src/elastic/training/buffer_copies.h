#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace torchspan::elastic {

/// Copies of a module's buffers, such as running statistics, which forward changes: a void step must not leave traces.
class BufferCopies {
 public:
  explicit BufferCopies(const torch::nn::Module& module);
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  void take();
  /// Undoes changes since take(), if there was one.
  void restore();
  /// Keeps what changed since take().
  void forget() { taken_ = false; }

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
  bool taken_ = false;
};

}  // namespace torchspan::elastic
