#pragma once
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/bytes.h>

namespace torchspan::data_parallel {

/// What all ranks of a group must have in common before they reduce anything.
struct Agreement {
  struct TensorFacts {
    std::string name;
    std::string type;  ///< "float32 [3, 4], strides [4, 1], requires grad"
    bool operator==(const TensorFacts&) const = default;
  };
  std::string failure = {};  ///< why this rank cannot go on at all; empty: it can
  std::vector<std::pair<std::string, std::string>> settings = {};
  std::vector<TensorFacts> tensors = {};

  void add(std::string name, const at::Tensor& tensor, bool sparse_gradient = false);
  Bytes encode() const;
  static Agreement decode(BytesView bytes);
};

/// Collective: throws the same Error{kInvalid} on all ranks, naming what differs first, or the rank that
/// cannot go on. Exchanges a digest, and everything only when digests differ. `things` is what tensors are
/// called in messages.
void agree(const collective::Group& group, const Agreement& mine,
           const std::string& things = "parameters and buffers");

/// Throws Error{kUnsupported} when the group's back end does not take the device of that parameter or buffer.
void check_device(const collective::Group& group, const std::string& name, const at::Tensor& tensor);

/// How the ranks' agreements differ; empty: they do not.
std::string first_difference(const std::vector<Agreement>& by_rank, const std::string& things);

}  // namespace torchspan::data_parallel
