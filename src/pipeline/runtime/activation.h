#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/batch.h>

namespace torchspan::pipeline {

/// Takes the place of a link's index for the pipeline's own input and output.
inline constexpr int kOutside = -1;

inline bool is_defined_tensor(const c10::IValue& member) {
  return member.isTensor() && member.toTensor().defined();
}

/// The batch that a link transfers, and which of its members need a gradient.
struct Activation {
  Batch batch;
  std::vector<std::uint8_t> wants_gradient;  ///< by member

  bool wants_any() const {
    return std::any_of(wants_gradient.begin(), wants_gradient.end(),
                       [](std::uint8_t wants) { return wants != 0; });
  }
};

}  // namespace torchspan::pipeline
