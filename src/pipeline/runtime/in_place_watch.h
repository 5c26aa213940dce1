#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// Detects layers and losses that change a tensor in place which a repeated forward needs unchanged.
class InPlaceWatch {
 public:
  /// Ignores tensors of inference mode, which have no version and cannot be changed outside of it.
  void add(const at::Tensor& tensor) {
    if (!tensor.is_inference()) versions_.emplace_back(tensor, version_of(tensor));
  }
  bool changed() const {
    return std::any_of(versions_.begin(), versions_.end(),
                       [](const auto& watched) { return version_of(watched.first) != watched.second; });
  }

 private:
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return static_cast<std::uint32_t>(tensor._version());
  }
  std::vector<std::pair<at::Tensor, std::uint32_t>> versions_;
};

}  // namespace torchspan::pipeline
