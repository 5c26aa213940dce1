#pragma once
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// The skip connections of one layer for one micro-batch: a layer whose forward has a parameter `Skips&` puts
/// tensors aside for a later layer and takes those that an earlier one put aside. Each name must have been
/// declared where the layer was added (Use::stashes, Use::pops). Lives during the forward only.
class Skips {
 public:
  Skips(std::map<std::string, at::Tensor> incoming, std::vector<std::string> may_stash)
      : incoming_(std::move(incoming)), may_stash_(std::move(may_stash)) {}

  /// Puts `value`, which may be undefined, aside under `name`. Throws Error{kInvalid} when the name was not
  /// declared or is taken.
  void stash(const std::string& name, at::Tensor value);
  /// What was put aside under `name`, once. Throws Error{kInvalid} when the name was not declared, or was
  /// taken before.
  at::Tensor pop(const std::string& name);

  /// Declared names that the forward left alone, as a text for an error; empty: none.
  std::string neglected() const;
  std::map<std::string, at::Tensor>& stashed() { return stashed_; }

 private:
  std::map<std::string, at::Tensor> incoming_;
  std::vector<std::string> may_stash_;
  std::map<std::string, at::Tensor> stashed_;
};

}  // namespace torchspan::pipeline
