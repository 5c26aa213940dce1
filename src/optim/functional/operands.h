#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

namespace torchspan::optim {

using Tensors = std::vector<at::Tensor>;

// The arithmetic of update rules, on one tensor or on several with LibTorch's multi-tensor operations. A rule
// is written once for both, and both give bitwise equal results.
namespace math {

inline at::Tensor clone(const at::Tensor& a) { return a.clone(); }
inline at::Tensor neg(const at::Tensor& a) { return a.neg(); }
inline at::Tensor sqrt(const at::Tensor& a) { return a.sqrt(); }
inline at::Tensor add(const at::Tensor& a, double value) { return a.add(value); }
inline at::Tensor add(const at::Tensor& a, const at::Tensor& b, double alpha) { return a.add(b, alpha); }
inline at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return a.mul(b); }
inline void sqrt_(at::Tensor& a) { a.sqrt_(); }
inline void add_(at::Tensor& a, double value) { a.add_(value); }
inline void add_(at::Tensor& a, const at::Tensor& b, double alpha) { a.add_(b, alpha); }
inline void mul_(at::Tensor& a, double value) { a.mul_(value); }
inline void mul_(at::Tensor& a, const at::Tensor& b) { a.mul_(b); }
inline void div_(at::Tensor& a, double value) { a.div_(value); }
inline void div_(at::Tensor& a, const at::Tensor& b) { a.div_(b); }
inline void addcmul_(at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double value) {
  a.addcmul_(b, c, value);
}
inline void addcdiv_(at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double value) {
  a.addcdiv_(b, c, value);
}
/// a = max(a, b), element by element.
inline void maximum_(at::Tensor& a, const at::Tensor& b) { at::maximum_out(a, a, b); }
inline bool missing(const at::Tensor& a) { return !a.defined(); }

inline Tensors neg(const Tensors& a) { return at::_foreach_neg(a); }
inline Tensors sqrt(const Tensors& a) { return at::_foreach_sqrt(a); }
inline Tensors add(const Tensors& a, double value) { return at::_foreach_add(a, value); }
inline Tensors add(const Tensors& a, const Tensors& b, double alpha) { return at::_foreach_add(a, b, alpha); }
inline Tensors mul(const Tensors& a, const Tensors& b) { return at::_foreach_mul(a, b); }
inline void sqrt_(Tensors& a) { at::_foreach_sqrt_(a); }
inline void add_(Tensors& a, double value) { at::_foreach_add_(a, value); }
inline void add_(Tensors& a, const Tensors& b, double alpha) { at::_foreach_add_(a, b, alpha); }
inline void mul_(Tensors& a, double value) { at::_foreach_mul_(a, value); }
inline void mul_(Tensors& a, const Tensors& b) { at::_foreach_mul_(a, b); }
inline void div_(Tensors& a, double value) { at::_foreach_div_(a, value); }
inline void div_(Tensors& a, const Tensors& b) { at::_foreach_div_(a, b); }
inline void addcmul_(Tensors& a, const Tensors& b, const Tensors& c, double value) {
  at::_foreach_addcmul_(a, b, c, value);
}
inline void addcdiv_(Tensors& a, const Tensors& b, const Tensors& c, double value) {
  at::_foreach_addcdiv_(a, b, c, value);
}
inline Tensors clone(const Tensors& a) {
  Tensors copies;
  for (const at::Tensor& tensor : a) copies.push_back(tensor.clone());
  return copies;
}
inline void maximum_(Tensors& a, const Tensors& b) {
  for (std::size_t i = 0; i < a.size(); ++i) maximum_(a[i], b[i]);
}
inline bool missing(const Tensors& a) { return !a.front().defined(); }

/// Calls `body` with one tensor, or with each tensor of lists of the same length.
template <class F, class... T>
void for_each_tensor(F&& body, at::Tensor& first, T&... others) {
  body(first, others...);
}
template <class F, class... T>
void for_each_tensor(F&& body, Tensors& first, T&... others) {
  for (std::size_t i = 0; i < first.size(); ++i) body(first[i], others[i]...);
}

}  // namespace math

/// Operands of an update rule: one parameter, or (T = Tensors) several on one device with the same number of
/// steps. Complex numbers are given as pairs of real ones.
template <class T>
struct Operands {
  T& parameter;       ///< is updated in place
  const T& gradient;  ///< is only read
  T* state;           ///< the slots, in the order of their names
  double steps;       ///< of the parameter, including this one
};

}  // namespace torchspan::optim
