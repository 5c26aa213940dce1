#include "elastic/training/buffer_copies.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace torchspan::elastic {

BufferCopies::BufferCopies(const torch::nn::Module& module) : buffers_(module.buffers()) {}

void BufferCopies::take() {
  const at::NoGradGuard no_grad;
  taken_ = true;
  copies_.resize(buffers_.size());
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (copies_[i].defined()) {
      copies_[i].copy_(buffers_[i]);
    } else {
      copies_[i] = buffers_[i].detach().clone();
    }
  }
}

void BufferCopies::restore() {
  const at::NoGradGuard no_grad;
  if (!std::exchange(taken_, false)) return;
  for (std::size_t i = 0; i < copies_.size(); ++i) buffers_[i].copy_(copies_[i]);
}

}  // namespace torchspan::elastic
