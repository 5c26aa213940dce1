#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::optim {

/// What an optimizer remembers of one parameter, by name: tensors, and its count of steps as a tensor "step"
/// of one integer.
using ParameterState = std::map<std::string, at::Tensor>;

/// One optimizer over a fixed list of parameters, which it updates in place from gradients that are handed to
/// it; `.grad` is neither read nor written. State is made when a parameter's first gradient comes. One thread
/// at a time.
class FunctionalOptimizer {
 public:
  /// `name` stands in errors. Throws Error{kInvalid} for an empty list, and naming the parameter that is
  /// undefined, not a leaf, not of floating-point numbers, or in the list twice.
  FunctionalOptimizer(std::string name, std::vector<at::Tensor> parameters);
  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  /// Updates every parameter whose gradient is defined: gradient i is for parameter i. An undefined one
  /// leaves its parameter and that parameter's state alone, its count of steps too. All gradients are checked
  /// before anything changes: Error{kInvalid} or Error{kUnsupported} names the parameter. Runs without
  /// recording gradients; the parameters' version counters advance.
  void step(std::span<const at::Tensor> gradients);
  /// The same for one parameter only.
  void step_one(std::size_t index, const at::Tensor& gradient);
  /// Throws what step() would throw for these gradients, and changes nothing.
  void check(std::span<const at::Tensor> gradients) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::string& name() const { return name_; }
  /// What errors call the parameters besides their index; one name for each.
  void set_parameter_names(std::vector<std::string> names) { parameter_names_ = std::move(names); }
  /// "parameter 3 'layer.weight' (shape [2, 3], Double)".
  std::string describe(std::size_t index) const;

  /// The learning rate. Without one (the default) lr() is not a number and set_lr() throws
  /// Error{kUnsupported}.
  virtual double lr() const;
  virtual void set_lr(double lr);
  /// Whether steps leave version counters alone, so that graphs which saved a parameter go on with its new
  /// value (Niu and others, Hogwild!, NIPS 2011). By default on throws Error{kUnsupported}.
  virtual void set_hogwild(bool on);
  /// The state of a parameter, not copied; empty before its first step, and always for an optimizer that
  /// keeps none.
  virtual ParameterState state(std::size_t index) const;
  /// Puts back, as copies, what state() gave. Throws Error{kInvalid} naming parameter and entry for what does
  /// not fit, and then changes nothing.
  virtual void load_state(std::size_t index, const ParameterState& state);

 protected:
  /// Why this optimizer cannot use a sparse gradient of a parameter, with what to do about it; empty: it can.
  virtual std::string refuse_sparse(const at::Tensor& parameter) const = 0;
  /// The same for a dense gradient.
  virtual std::string refuse_dense(const at::Tensor& parameter) const;
  /// Applies a defined gradient of the parameter's shape, type and device.
  virtual void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) = 0;
  /// Applies all gradients that are defined; by default one after the other.
  virtual void update_all(std::span<const at::Tensor> gradients);

  std::vector<at::Tensor>& parameters() { return parameters_; }

 private:
  void check_one(std::size_t index, const at::Tensor& gradient) const;

  const std::string name_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> parameter_names_;
};

/// Throws Error{kInvalid} naming the option unless its value is finite and not negative.
void check_not_negative(std::string_view optimizer, std::string_view option, double value);
/// Throws Error{kInvalid} naming the option unless its value is from 0 up and below 1.
void check_share(std::string_view optimizer, std::string_view option, double value);
/// Throws Error{kInvalid} naming the option unless its value is finite and above 0.
void check_positive(std::string_view optimizer, std::string_view option, double value);

}  // namespace torchspan::optim
