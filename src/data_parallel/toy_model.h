#pragma once
#include <random>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <torchspan/data_parallel/reducer.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::data_parallel::testing {

using torchspan::testing::error_text;
using torchspan::testing::on_ranks;
using torchspan::testing::over_shared_memory;
using torchspan::testing::PerRank;
using torchspan::testing::Rank;
using Tensors = std::vector<at::Tensor>;

/// A leaf with fixed values, the same on all ranks.
inline at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, double scale = 1) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  const auto values = at::arange(1, count + 1, at::kDouble).mul(0.37).sin().mul(scale);
  return values.reshape(sizes).to(dtype).set_requires_grad(true);
}

inline std::vector<Parameter> named(const Tensors& tensors) {
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    parameters.push_back({"p" + std::to_string(i), tensors[i], false});
  return parameters;
}

/// A scalar that depends on every one of `parameters` and on the rank and step.
inline at::Tensor loss_of(const Tensors& parameters, int rank, int step) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const double factor = 1 + rank + 0.5 * step + 0.1 * static_cast<double>(i);
    loss = loss + (parameters[i] * factor).sin().sum().to(at::kDouble);
  }
  return loss;
}

/// The average over ranks of the gradients that each rank would compute alone, in double.
inline Tensors expected(const Tensors& parameters, int size, int step) {
  Tensors sums;
  for (int rank = 0; rank < size; ++rank) {
    Tensors copies;
    for (const auto& parameter : parameters)
      copies.push_back(parameter.detach().clone().set_requires_grad(true));
    loss_of(copies, rank, step).backward();
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const at::Tensor gradient = copies[i].grad().to(at::kDouble) / size;
      if (rank == 0) {
        sums.push_back(gradient);
      } else {
        sums[i] = sums[i] + gradient;
      }
    }
  }
  return sums;
}

inline double tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 1e-6; }

inline void expect_close(const at::Tensor& got, const at::Tensor& wanted, double tolerance) {
  ASSERT_TRUE(got.defined());
  const at::Tensor dense = got.is_sparse() ? got.to_dense() : got;
  EXPECT_TRUE(at::allclose(dense.to(at::kDouble), wanted.to(at::kDouble), tolerance, tolerance))
      << dense << "\nagainst\n"
      << wanted;
}

/// One step: forward of `loss`, marks, backward.
inline void step(Reducer& reducer, const at::Tensor& loss, ForwardOptions options = {}) {
  reducer.prepare_for_backward({loss}, options).at(0).backward();
}

inline void zero(const Tensors& parameters, bool to_none) {
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    if (to_none) {
      parameter.mutable_grad() = at::Tensor();
    } else {
      parameter.mutable_grad().detach().zero_();
    }
  }
}

}  // namespace torchspan::data_parallel::testing
