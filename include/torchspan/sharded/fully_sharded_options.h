#pragma once
#include <cstddef>
#include <optional>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

namespace torchspan::sharded {

/// dtypes of a training step, as PyTorch's MixedPrecisionPolicy of fully_shard(). Optimizer, checkpoints and parameters
/// outside of units keep the dtype of the module; only floating-point tensors are cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;  ///< of gathered parameters; none: the module's
  std::optional<at::ScalarType> reduce_dtype =
      std::nullopt;  ///< of reductions of gradients; none: the module's
  std::optional<at::ScalarType> output_dtype =
      std::nullopt;                 ///< of the whole module's outputs; none: as computed
  bool cast_forward_inputs = true;  ///< to param_dtype: inputs of units and of the whole module
};

/// Options of FullyShardedDataParallel. Must be equal on all ranks.
struct FullyShardedOptions {
  /// Frees a unit's parameters after its forward. False: they stay gathered until its backward, which saves a gather
  /// and costs memory (ZeRO stage 2).
  bool reshard_after_forward = true;
  bool prefetch = true;      ///< gathers the next unit while one computes
  bool initial_sync = true;  ///< rank 0's parameters and buffers; false: those of each rank must be equal
  /// Gradients of parameters of at least this size are reduced alone, as soon as backward has computed them, from the
  /// last such parameter of a unit to the first; those of smaller ones together.
  std::size_t alone_bytes = std::size_t{1} << 20;
  /// Limit of the gradients that are reduced while backward continues. Beyond it, backward waits.
  std::size_t overlap_bytes = std::size_t{16} << 20;
  /// Over shared memory, the parameters of a unit of at least this size are not copied when they are gathered: each rank
  /// reads the others' parts where they are, and must not write to gathered parameters (SIGSEGV). 0: all are copied, as
  /// those with another param_dtype are anyway.
  std::size_t mapped_bytes = std::size_t{1} << 20;
  MixedPrecision precision = {};
  /// Hybrid sharding: this many adjacent ranks, such as those of a host, divide one copy of the model, and the copies
  /// average their gradients. Must divide the number of ranks; 0: all ranks have one copy.
  int shard_ranks = 0;
};

}  // namespace torchspan::sharded
