#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace torchspan::state {

/// State of an optimizer: ordered tensors by name. Numbers are zero-dimensional tensors, strings are byte
/// tensors. Works with torch::save and torch::load, and can be sent to other workers. The names are
/// "group.<group>.kind", "group.<group>.lr" and "group.<group>.parameter.<name>.<entry>".
struct StateDict : torch::OrderedDict<std::string, at::Tensor> {
  using Entries = std::vector<std::pair<std::string, at::Tensor>>;
  StateDict() : OrderedDict("Entry") {}
  /// Throws Error{kInvalid} naming an entry that is listed twice.
  explicit StateDict(Entries entries);
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const StateDict& state);
/// Throws Error{kInvalid} for an archive with other contents.
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, StateDict& state);

}  // namespace torchspan::state
