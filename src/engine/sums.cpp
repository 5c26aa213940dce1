#include "engine/sums.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "engine/api/compat.h"

namespace torchspan::engine {
namespace {

bool is_plain_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !at::isTensorSubclassLike(tensor);
}

/// Whether the indices or values of a sparse tensor have two handles, its and this one, and no other view.
bool part_is_unshared(const at::Tensor& part) {
  return part.use_count() == 2 && part.storage().use_count() == 1 && part.is_contiguous();
}

/// isTensorSubclassLike() returns true for every sparse tensor.
bool is_plain_sparse(const at::Tensor& tensor) {
  const auto others = at::kTensorSubclassLike - c10::DispatchKeySet(c10::DispatchKey::Sparse);
  return tensor.layout() == at::kSparse && (tensor.key_set() & others).empty();
}

/// Copies the parts of `gradient` that have other owners: an embedding's gradient has its input as indices.
at::Tensor adopt_sparse(at::Tensor gradient) {
  if (gradient.use_count() != 1 || !is_plain_sparse(gradient)) return gradient.clone();
  const at::SparseTensorImpl& sparse = compat::sparse_impl(gradient);
  const bool own_indices = part_is_unshared(sparse.indices()), own_values = part_is_unshared(sparse.values());
  if (own_indices && own_values) return gradient;
  const at::Tensor indices = own_indices ? sparse.indices() : sparse.indices().clone();
  const at::Tensor values = own_values ? sparse.values() : sparse.values().clone();
  return at::_sparse_coo_tensor_unsafe(indices, values, gradient.sizes(), gradient.options())
      ._coalesced_(gradient.is_coalesced());
}

bool can_take_in_place(const at::Tensor& held, const at::Tensor& incoming) {
  if (!is_unshared(held) || !held.is_non_overlapping_and_dense()) return false;
  if (held.scalar_type() != incoming.scalar_type() || !held.sizes().equals(incoming.sizes())) return false;
  return is_plain_dense(incoming) || (incoming.is_sparse() && held.is_contiguous());
}

}  // namespace

bool is_unshared(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && is_plain_dense(tensor) && !tensor._is_zerotensor() &&
         tensor.has_storage() && tensor.storage().use_count() == 1;
}

at::Tensor add_into(at::Tensor& held, at::Tensor& incoming) {
  const bool turned = held.is_sparse() && !incoming.is_sparse();
  at::Tensor& base = turned ? incoming : held;
  at::Tensor& other = turned ? held : incoming;
  if (!can_take_in_place(base, other)) {
    at::Tensor sum = base + other;
    std::swap(held, sum);
    return sum;
  }
  base.add_(other);
  if (turned) std::swap(held, incoming);
  return {};
}

at::Tensor sum_of(at::Tensor held, at::Tensor gradient) {
  // LibTorch adds the sum so far to a new sparse gradient; the order determines the last bits.
  if (held.is_sparse() && gradient.is_sparse()) std::swap(held, gradient);
  add_into(held, gradient);
  return held;
}

at::Tensor adopt_gradient(const at::Tensor& parameter, at::Tensor gradient) {
  namespace utils = torch::autograd::utils;
  if (gradient.is_sparse()) return adopt_sparse(std::move(gradient));
  if (!is_plain_dense(gradient) || !is_plain_dense(parameter)) return gradient.clone();
  if (is_unshared(gradient) && utils::obeys_layout_contract(gradient, parameter)) return gradient.detach();
  return utils::clone_obey_contract(gradient, parameter);
}

}  // namespace torchspan::engine
