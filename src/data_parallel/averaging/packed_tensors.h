#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>

namespace torchspan::data_parallel {

/// A flat copy of `tensors`, which have one dtype and device and are not empty, in the group's shared memory if
/// they are on the CPU.
at::Tensor pack(const collective::Group& group, const std::vector<at::Tensor>& tensors);

/// Parts of `flat` with the sizes of `tensors`, in their order.
std::vector<at::Tensor> parts_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

/// The averages of tensors of any dtypes and devices over the ranks of a group: one message for each type.
class PackedAverages {
 public:
  /// Copies `tensors` and begins to reduce the copies.
  PackedAverages(const collective::Group& group, const std::vector<at::Tensor>& tensors);
  /// Returns the averages in the order of the tensors, of which they are no copies.
  std::vector<at::Tensor> wait() const;

 private:
  struct Message {
    std::vector<std::size_t> indices;
    std::vector<at::Tensor> tensors;
    Future<at::Tensor> average = {};
  };
  std::size_t count_ = 0;
  std::vector<Message> messages_;
};

}  // namespace torchspan::data_parallel
