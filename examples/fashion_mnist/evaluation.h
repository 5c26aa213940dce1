#pragma once
#include <functional>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/team.h"

namespace fashion_mnist {

/// Maps images to a score for each class.
using Forward = std::function<at::Tensor(const at::Tensor&)>;

/// The share of images that a model classifies right, without gradients. Each rank of the team tests its part of the
/// images; all get the share of the whole.
double accuracy(const Dataset& data, const Forward& forward, const Team& team = {});

}  // namespace fashion_mnist
