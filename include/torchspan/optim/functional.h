#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::optim {

/// One optimizer over a fixed list of parameters, which it updates in place from gradients that are handed to
/// it; `.grad` is neither read nor written. State is made when a parameter's first gradient comes. One thread
/// at a time.
class FunctionalOptimizer {
 public:
  /// `name` stands in errors. Throws Error{kInvalid} for an empty list, and naming the parameter that is
  /// undefined, not a leaf, or in the list twice.
  FunctionalOptimizer(std::string name, std::vector<at::Tensor> parameters);
  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  /// Updates every parameter whose gradient is defined: gradient i is for parameter i. An undefined one
  /// leaves its parameter and that parameter's state alone, its count of steps too. All gradients are checked
  /// before anything changes: Error{kInvalid} or Error{kUnsupported} names the parameter. Runs without
  /// recording gradients; the parameters' version counters advance.
  void step(std::span<const at::Tensor> gradients);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::string& name() const { return name_; }

 protected:
  /// Why this optimizer cannot use a sparse gradient of a parameter, with what to do about it; empty: it can.
  virtual std::string refuse_sparse(const at::Tensor& parameter) const = 0;
  /// Applies a defined gradient of the parameter's shape, type and device.
  virtual void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) = 0;

 private:
  void check(std::size_t index, const at::Tensor& gradient) const;
  std::string describe(std::size_t index) const;

  const std::string name_;
  std::vector<at::Tensor> parameters_;
};

/// Throws Error{kInvalid} naming the option unless its value is finite and not negative.
void check_not_negative(std::string_view optimizer, std::string_view option, double value);

}  // namespace torchspan::optim
