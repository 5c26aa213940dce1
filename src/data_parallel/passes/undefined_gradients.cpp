#include "data_parallel/passes/undefined_gradients.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

void UndefinedGradients::pass_begins(const engine::GradientSink& sink) {
  if (!sink.writes_grad_field()) return;
  MutexLock lock(mutex_);
  if (std::exchange(noted_, true)) return;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_.tensor(slot).mutable_grad().defined()) undefined_.push_back(slot);
  }
}

void UndefinedGradients::forget() {
  MutexLock lock(mutex_);
  noted_ = false;
  undefined_.clear();
}

void UndefinedGradients::restore() {
  std::vector<std::size_t> undefined;
  {
    MutexLock lock(mutex_);
    noted_ = false;
    undefined.swap(undefined_);
  }
  for (const std::size_t slot : undefined) slots_.tensor(slot).mutable_grad() = at::Tensor();
}

}  // namespace torchspan::data_parallel
