#pragma once
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

/// The skip connections of one layer for one micro-batch. A layer whose forward has a parameter `Skips&`
/// stashes tensors for a later layer and pops those of an earlier one. Declare each name where the layer is
/// added (Use::stashes, Use::pops). Valid during the forward only.
class Skips {
 public:
  Skips(std::map<std::string, at::Tensor> incoming, std::vector<std::string> may_stash)
      : incoming_(std::move(incoming)), may_stash_(std::move(may_stash)) {}

  /// Stashes `value`, which may be undefined, under `name`. Throws Error{kInvalid} for a name that is
  /// undeclared or already stashed.
  void stash(const std::string& name, at::Tensor value);
  /// Returns the tensor stashed under `name`, once. Throws Error{kInvalid} for a name that is undeclared or
  /// already popped.
  at::Tensor pop(const std::string& name);

  /// Error text that lists declared names which the forward did not use; empty: none.
  std::string unused_keys() const;
  std::map<std::string, at::Tensor>& stashed() { return stashed_; }

 private:
  std::map<std::string, at::Tensor> incoming_;
  std::vector<std::string> may_stash_;
  std::map<std::string, at::Tensor> stashed_;
};

}  // namespace torchspan::pipeline
