#pragma once
#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/options.h>
#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {

/// The parameters whose gradients one reducer averages. A slot is one parameter of one replica:
/// replica · count() + parameter. Immutable.
class ParameterSlots {
 public:
  /// Keeps the parameters that require gradients; remembers the others of the first replica.
  explicit ParameterSlots(const Reducer::Replicas& replicas);

  /// Number of slots.
  std::size_t size() const { return replicas_.size() * count_; }
  /// Number of parameters per replica.
  std::size_t count() const { return count_; }
  const Reducer::Replicas& replicas() const { return replicas_; }
  const at::Tensor& tensor(std::size_t slot) const { return replicas_[slot / count_][slot % count_].tensor; }
  const std::string& name(std::size_t slot) const { return replicas_[slot / count_][slot % count_].name; }
  /// Quoted names for a message, the first ten in full.
  std::string names(const std::vector<std::size_t>& slots) const;
  /// Slots that the graphs of `outputs` do not reach.
  std::vector<std::size_t> unreached_from(const std::vector<at::Tensor>& outputs) const;
  /// Throws Error{kInvalid} if a parameter that required no gradient at construction requires one now.
  void check_frozen() const;

 private:
  const Reducer::Replicas replicas_;
  const std::size_t count_;
  std::vector<Parameter> frozen_;  // the first replica's other parameters
  std::unordered_map<const c10::TensorImpl*, std::size_t> slot_of_;
};

}  // namespace torchspan::data_parallel
