#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

/// What to do when a backward pass reaches a parameter without having come through the wrapper's forward:
/// its gradients stay local, and the replicas would drift apart.
enum class Unwrapped : std::uint8_t { kWarnOnce, kThrow, kIgnore };

/// All ranks give the same: a difference is an error on every one of them.
struct DataParallelOptions {
  double bucket_cap_mb = 25;   ///< MiB of gradients reduced together
  double first_bucket_mb = 1;  ///< MiB in the bucket that is reduced first, so that it begins early
  /// Replaces both, unless it is empty: MiB by bucket of one dtype and device, in the order of reduction. The
  /// last is that of all further ones.
  std::vector<double> bucket_cap_mb_list = {};
  /// The graph is walked every step for parameters that it does not reach; without it, one that gets no
  /// gradient fails the backward pass by name.
  bool find_unused_parameters = false;
  bool static_graph = false;  ///< the first step's graph is that of all steps; anything else is an error
  bool gradient_as_bucket_view = true;  ///< `.grad` lies in the bucket: less memory, no copies
  bool broadcast_buffers = true;        ///< rank 0's buffers, before every forward that will be reduced
  bool initial_sync = true;             ///< everybody begins with rank 0's parameters and buffers
  bool rebuild_buckets = true;          ///< after the first step, in the order in which gradients really come
  /// One forward is followed by several backward passes over parts of its outputs, which together give every
  /// parameter that they reach its gradient, and every other one must be found unused. Without it, a pass
  /// that leaves parameters out fails.
  bool partial_backward = false;
  Unwrapped unwrapped_backward = Unwrapped::kWarnOnce;
  std::vector<std::string> ignored_parameters =
      {};  ///< qualified names of parameters and buffers to leave alone
  std::vector<std::string> sparse_parameters = {};  ///< besides those of embeddings that say sparse(true)

  /// Throws Error{kInvalid} naming the field that is wrong.
  void validate() const;
};

/// A parameter as the reducer is to know it.
struct Parameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

}  // namespace torchspan::data_parallel
