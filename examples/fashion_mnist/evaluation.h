#pragma once
#include <cstdint>
#include <functional>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "fashion_mnist/dataset.h"

namespace fashion_mnist {

/// Maps images to a score for each class.
using Forward = std::function<at::Tensor(const at::Tensor&)>;

/// How many images a model is tested with at a time.
inline constexpr std::int64_t kTestBatch = 500;

/// Images that a model classifies right: those at `positions`, without gradients.
std::int64_t count_right(const Dataset& data, const at::Tensor& positions, const Forward& forward);
/// The share of all images that a model classifies right.
double accuracy(const Dataset& data, const Forward& forward);

}  // namespace fashion_mnist
