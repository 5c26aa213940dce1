#include "optim/functional/fused_steps.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <unordered_set>

#include <ATen/core/ivalue.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/StorageImpl.h>

#include <torchspan/optim/algorithms.h>

#include "optim/operators.h"

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

namespace {

constexpr const char* kFusedAdam = "aten::_fused_adam_";
constexpr const char* kFusedAdamW = "aten::_fused_adamw_";
constexpr const char* kFusedSgd = "aten::_fused_sgd_";

template <class Signature>
struct LastParameter;
template <class Result, class... Parameters>
struct LastParameter<Result(Parameters...)> {
  using Type = std::tuple_element_t<sizeof...(Parameters) - 1, std::tuple<Parameters...>>;
};

// The signatures are the same in all releases that have the operators, except for the type of optional tensors.
// _fused_adamw_ has that of _fused_adam_.
using FusedAdamSignature = at::_ops::_fused_adam_::schema;
using OptionalTensor = LastParameter<FusedAdamSignature>::Type;
using NoTensor = std::decay_t<OptionalTensor>;
using FusedSgdSignature = void(at::TensorList, at::TensorList, at::TensorList, double, double, double, double,
                               bool, bool, bool, OptionalTensor, OptionalTensor);

/// Whether the kernels of all releases have the dtype.
bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

bool has_format_of(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.layout() == at::kStrided && tensor.scalar_type() == like.scalar_type() &&
         tensor.sizes() == like.sizes() && tensor.strides() == like.strides() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

/// Whether the kernels can update these parameters where they are. A slot may be undefined.
bool can_update_in_place(const Tensors& parameters, std::span<const Tensors> slots) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!has_kernels(parameter.scalar_type()) || !has_format_of(parameter, parameter) ||
        !parameter.is_non_overlapping_and_dense()) {
      return false;
    }
    const bool fit = std::all_of(slots.begin(), slots.end(), [&](const Tensors& slot) {
      return !slot[i].defined() || has_format_of(slot[i], parameter);
    });
    if (!fit) return false;
  }
  return true;
}

/// The gradients as the kernels can read them, which expect the strides of the parameters.
Tensors readable_gradients(const Operands<Tensors>& on, std::span<const Tensors> slots) {
  std::unordered_set<const c10::StorageImpl*> written;
  const auto storage_of = [](const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); };
  for (const at::Tensor& parameter : on.parameter) written.insert(storage_of(parameter));
  for (const Tensors& slot : slots) {
    for (const at::Tensor& one : slot) {
      if (one.defined()) written.insert(storage_of(one));
    }
  }
  Tensors readable = on.gradient;
  for (std::size_t i = 0; i < readable.size(); ++i) {
    const at::Tensor& parameter = on.parameter[i];
    if (has_format_of(readable[i], parameter) && !written.contains(storage_of(readable[i]))) continue;
    readable[i] = at::empty_like(parameter).copy_(readable[i]);
  }
  return readable;
}

/// Adam and AdamW. The kernel reads the number of steps from a float tensor on the device, one for each parameter;
/// all parameters of a call have the same, so they share it.
template <class Options>
bool run_moments(const char* name, const Options& options, const Operands<Tensors>& on) {
  // Kernels of newer releases round options to float for float parameters, and would divide by 1 - 1.
  if (static_cast<float>(options.beta1) == 1.0F || static_cast<float>(options.beta2) == 1.0F) return false;
  const std::span<const Tensors> slots(on.state, options.amsgrad ? 3 : 2);
  const at::Tensor& first = on.parameter.front();
  if (!has_operator(name, first) || !can_update_in_place(on.parameter, slots)) return false;
  const Tensors gradients = readable_gradients(on, slots);
  const Tensors steps(on.parameter.size(), at::full({}, on.steps, first.options().dtype(at::kFloat)));
  const at::TensorList largest = options.amsgrad ? at::TensorList(slots[2]) : at::TensorList();
  return call_operator<FusedAdamSignature>(
      name, first, at::TensorList(on.parameter), at::TensorList(gradients), at::TensorList(slots[0]),
      at::TensorList(slots[1]), largest, at::TensorList(steps), options.lr, options.beta1, options.beta2,
      options.weight_decay, options.eps, options.amsgrad, options.maximize, NoTensor(), NoTensor());
}

}  // namespace

bool has_fused_operator(const Adam&, const at::Tensor& like) { return has_operator(kFusedAdam, like); }
bool has_fused_operator(const AdamW&, const at::Tensor& like) { return has_operator(kFusedAdamW, like); }
bool has_fused_operator(const SGD&, const at::Tensor& like) { return has_operator(kFusedSgd, like); }

bool run_fused_operator(const Adam& options, const Operands<Tensors>& on) {
  return run_moments(kFusedAdam, options, on);
}

bool run_fused_operator(const AdamW& options, const Operands<Tensors>& on) {
  return run_moments(kFusedAdamW, options, on);
}

bool run_fused_operator(const SGD& options, const Operands<Tensors>& on) {
  const std::span<Tensors> slots(on.state, options.momentum == 0 ? 0 : 1);
  const at::Tensor& first = on.parameter.front();
  if (!has_operator(kFusedSgd, first) || !can_update_in_place(on.parameter, slots)) return false;
  const Tensors gradients = readable_gradients(on, slots);
  const bool is_first_step = !slots.empty() && math::missing(slots[0]);
  Tensors buffers;
  if (is_first_step) {  // the operator fills them
    for (const at::Tensor& parameter : on.parameter) buffers.push_back(at::empty_like(parameter));
  } else if (!slots.empty()) {
    buffers = slots[0];
  }
  const bool done = call_operator<FusedSgdSignature>(
      kFusedSgd, first, at::TensorList(on.parameter), at::TensorList(gradients), at::TensorList(buffers),
      options.weight_decay, options.momentum, options.lr, options.dampening, options.nesterov,
      options.maximize, is_first_step, NoTensor(), NoTensor());
  if (done && is_first_step) slots[0] = buffers;
  return done;
}

}  // namespace torchspan::optim
