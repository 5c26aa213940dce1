#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/bytes.h>

namespace torchspan::data_parallel {

/// What all ranks of a group must have in common before they reduce anything.
struct Agreement {
  struct TensorFacts {
    std::string name;
    std::string type;  ///< "float32 [3, 4], strides [4, 1], requires grad"
    bool operator==(const TensorFacts&) const = default;
  };
  std::string failure = {};  ///< why this rank cannot take part; empty if it can
  std::vector<std::pair<std::string, std::string>> settings = {};
  std::vector<TensorFacts> tensors = {};

  void add(std::string name, const at::Tensor& tensor, bool sparse_gradient = false);
  Bytes encode() const;
  static Agreement decode(BytesView bytes);
};

/// ", elements [0:2, 0:3] of [4, 3]" of a part of a tensor; empty for a whole one. Part of TensorFacts::type: ranks that have
/// different parts do not agree.
std::string part_in_words(const at::Tensor& tensor);

/// Collective: throws the same Error{kInvalid} on all ranks, naming the first difference, or the rank that
/// reports a failure. Exchanges digests, and everything only if they differ. Messages call the tensors
/// `things`.
void agree(const collective::Group& group, const Agreement& mine,
           const std::string& things = "parameters and buffers");

/// Throws Error{kUnsupported} if the group's backend does not support the device of this parameter or buffer.
void check_device(const collective::Group& group, const std::string& name, const at::Tensor& tensor);

/// Describes the first difference between the ranks' agreements; empty if there is none.
std::string first_difference(const std::vector<Agreement>& by_rank, const std::string& things);

}  // namespace torchspan::data_parallel
