#pragma once
#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "rpc/device_memory/lent_area.h"
#include "rpc/device_memory/messages.h"

namespace torchspan::rpc {

/// The memory of one tensor of an outgoing message, or of a part of one. Its destructor frees the memory, unless the peer
/// has the message. The device must have done its copies then.
class LentTensor {
 public:
  LentTensor(std::shared_ptr<LentArea> area, Lease lease, std::uint32_t route)
      : area_(std::move(area)), lease_(lease), route_(route) {}
  ~LentTensor() { area_->drop(lease_.id); }
  LentTensor(const LentTensor&) = delete;
  LentTensor& operator=(const LentTensor&) = delete;

  /// The memory as a dense tensor of the sizes and dtype of `tensor`; does not own it.
  at::Tensor view_like(const at::Tensor& tensor) const;
  SharedPlace place(std::size_t segment) const {
    return {static_cast<std::uint32_t>(segment), route_, lease_.id, lease_.offset, lease_.bytes};
  }
  /// Call before the message is sent, and take_back() if the channel does not accept it.
  void lend() const { area_->lend(lease_.id); }
  void take_back() const { area_->take_back(lease_.id); }
  /// Whether the peer has not returned the memory.
  bool in_use() const { return area_->has(lease_.id); }
  std::size_t bytes() const { return lease_.bytes; }

 private:
  const std::shared_ptr<LentArea> area_;
  const Lease lease_;
  const std::uint32_t route_;
};
using LentTensorPtr = std::shared_ptr<const LentTensor>;

}  // namespace torchspan::rpc
