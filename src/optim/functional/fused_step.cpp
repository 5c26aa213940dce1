#include "optim/functional/fused_step.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include <ATen/TensorIterator.h>

namespace torchspan::optim {
namespace {

/// Whether the tensor's elements are values of `dtype` in this process's memory, without a pending negation.
bool is_readable(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         tensor.has_storage() && !tensor.is_neg() && !tensor._is_zerotensor();
}

/// Whether the elements of both tensors have the same order in memory, without gaps if `like` has none.
bool same_memory_format(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.sizes() == like.sizes() &&
         (tensor.strides() == like.strides() || (tensor.is_contiguous() && like.is_contiguous()));
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto first = [](const at::Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  };
  const std::uintptr_t begin_a = first(a), begin_b = first(b);
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

bool can_update(const at::Tensor& parameter, std::span<const at::Tensor> slots) {
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) return false;
  if (!is_readable(parameter, dtype) || !parameter.is_non_overlapping_and_dense()) return false;
  return std::all_of(slots.begin(), slots.end(), [&](const at::Tensor& slot) {
    return !slot.defined() || (is_readable(slot, dtype) && same_memory_format(slot, parameter));
  });
}

/// Whether the kernels can read the gradient where it is.
bool can_read(const at::Tensor& gradient, const at::Tensor& parameter, std::span<const at::Tensor> slots) {
  if (!is_readable(gradient, parameter.scalar_type()) || !same_memory_format(gradient, parameter))
    return false;
  return !overlap(gradient, parameter) &&
         std::none_of(slots.begin(), slots.end(),
                      [&](const at::Tensor& slot) { return slot.defined() && overlap(gradient, slot); });
}

template <class T, class Step>
void run(const Step& step, const Operands<at::Tensor>& on, const at::Tensor& gradient) {
  FusedBuffers<T> all{on.parameter.data_ptr<T>(), gradient.data_ptr<T>(), {}, 0};
  for (std::size_t slot = 0; slot < step.slots(); ++slot) all.state[slot] = on.state[slot].data_ptr<T>();
  all.count = static_cast<std::size_t>(on.parameter.numel());
  if (on.parameter.numel() < at::internal::GRAIN_SIZE) return run_fused(step, all);
  // at::parallel_for() is serial in code that is compiled without OpenMP; LibTorch's iterators are not.
  at::TensorIterator parts = at::TensorIterator::borrowing_nullary_op(on.parameter);
  parts.for_each([&](char** data, const std::int64_t*, std::int64_t count) {
    FusedBuffers<T> part = all;
    part.parameter = reinterpret_cast<T*>(data[0]);
    const std::ptrdiff_t offset = part.parameter - all.parameter;
    part.gradient += offset;
    for (std::size_t slot = 0; slot < step.slots(); ++slot) part.state[slot] += offset;
    part.count = static_cast<std::size_t>(count);
    run_fused(step, part);
  });
}

}  // namespace

template <class Step>
bool fused_step(const Step& step, const Operands<at::Tensor>& on) {
  const std::span<at::Tensor> slots(on.state, step.slots());
  if (!can_update(on.parameter, slots) || on.gradient.scalar_type() != on.parameter.scalar_type())
    return false;
  at::Tensor gradient = on.gradient;
  if (!can_read(gradient, on.parameter, slots)) gradient = at::empty_like(on.parameter).copy_(gradient);
  for (at::Tensor& slot : slots) {
    if (!slot.defined()) slot = at::zeros_like(on.parameter);
  }
  if (on.parameter.scalar_type() == at::kFloat) {
    run<float>(step, on, gradient);
  } else {
    run<double>(step, on, gradient);
  }
  return true;
}

template bool fused_step(const SgdStep&, const Operands<at::Tensor>&);
template bool fused_step(const AdamStep&, const Operands<at::Tensor>&);
template bool fused_step(const AdagradStep&, const Operands<at::Tensor>&);
template bool fused_step(const RmspropStep&, const Operands<at::Tensor>&);

}  // namespace torchspan::optim
