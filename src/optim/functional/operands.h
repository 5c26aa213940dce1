#pragma once
#include "optim/functional/tensors.h"

namespace torchspan::optim {

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
