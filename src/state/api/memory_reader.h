#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/state/source.h>

#include "core/api/throw_invalid.h"

namespace torchspan::state {

/// A part of a tensor; shares its memory.
inline at::Tensor box_of(at::Tensor whole, at::IntArrayRef sizes, const std::vector<std::int64_t>& offset) {
  for (std::size_t i = 0; i < offset.size(); ++i)
    whole = whole.narrow(static_cast<std::int64_t>(i), offset[i], sizes[i]);
  return whole;
}

/// Reads whole tensors, and values, that are in memory.
class MemoryReader : public StateReader {
 public:
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }

 protected:
  std::vector<std::string> all_names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  bool contains(const std::string& name) const override { return tensors_.contains(name); }
  at::Tensor read_tensor(const std::string& name) const override { return find(name); }
  std::vector<std::int64_t> shape_of(const std::string& name) const override {
    return find(name).sizes().vec();
  }
  at::ScalarType dtype_of(const std::string& name) const override { return find(name).scalar_type(); }
  void read_box(const std::string& name, const at::Tensor& target,
                const std::vector<std::int64_t>& offset) const override {
    const at::NoGradGuard no_grad;
    target.copy_(box_of(find(name), target.sizes(), offset));
  }
  const Value* find_value(const std::string& name) const override {
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }

  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, Value> values_;

 private:
  const at::Tensor& find(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw_invalid("{} has no tensor '{}'", describe(), name);
    return found->second;
  }
};

}  // namespace torchspan::state
