#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::data_parallel {

/// What to do when a backward pass reaches a parameter but did not come through an output of the wrapper.
/// Its gradients then stay local and the replicas diverge.
enum class OnUnreducedBackward : std::uint8_t { kWarnOnce, kThrow, kIgnore };
using Unwrapped [[deprecated("use OnUnreducedBackward")]] = OnUnreducedBackward;

/// Options of DistributedDataParallel. Must be equal on all ranks; a difference is an error on every rank.
struct DataParallelOptions {
  double bucket_cap_mb = 25;   ///< MiB of gradients per bucket
  double first_bucket_mb = 1;  ///< MiB in the first bucket, so that reduction starts early
  /// MiB of each bucket of one dtype and device, in the order of reduction; later buckets use the last
  /// value. If not empty, replaces bucket_cap_mb and first_bucket_mb.
  std::vector<double> bucket_cap_mb_list = {};
  /// Walks the graph in every step to find parameters that it does not reach. False: a parameter without a
  /// gradient fails the backward pass, which names it.
  bool find_unused_parameters = false;
  bool static_graph = false;            ///< all steps have the first step's graph; else an error
  bool gradient_as_bucket_view = true;  ///< `.grad` is a view of the bucket: less memory, no copies
  bool broadcast_buffers = true;        ///< from rank 0, before every reduced forward
  bool initial_sync = true;             ///< broadcast rank 0's parameters and buffers at the start
  bool rebuild_buckets = true;          ///< in the order of gradients, after the first step
  /// Allows several backward passes after one forward, over parts of its outputs. Together they must give
  /// every parameter that they reach its gradient, and all others must be found unused. False: a pass that
  /// misses parameters fails.
  bool partial_backward = false;
  OnUnreducedBackward unwrapped_backward = OnUnreducedBackward::kWarnOnce;
  std::vector<std::string> ignored_parameters = {};  ///< qualified names of parameters and buffers to skip
  std::vector<std::string> sparse_parameters = {};   ///< besides embeddings with sparse(true)

  /// Throws Error{kInvalid} that names the wrong field.
  void validate() const;
};

/// Options of DistributedDataParallel::join().
struct JoinOptions {
  /// Divides sums by the number of all ranks, even after some have run out of batches. False: by the number
  /// of ranks that still have batches.
  bool divide_by_initial_world_size = true;
  /// Throws on all ranks as soon as one has run out of batches, instead of letting it take part with zeros.
  bool throw_on_early_termination = false;
};

/// A parameter as the reducer sees it.
struct Parameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

/// While it lives, backward passes of new forwards of `Wrapped` reduce nothing; see no_sync() of the wrappers. Movable, for
/// example into a std::optional. Several may live at once, and end in any order, also after the wrapper.
template <class Wrapped>
class NoSync {
 public:
  explicit NoSync(const std::shared_ptr<Wrapped>& wrapped) : wrapped_(wrapped) {
    wrapped->pause_reductions();
  }
  ~NoSync() { end(); }
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&& other) noexcept {
    if (this == &other) return *this;
    end();
    wrapped_ = std::move(other.wrapped_);
    return *this;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  void end() noexcept {
    if (const auto wrapped = std::exchange(wrapped_, {}).lock()) wrapped->resume_reductions();
  }

  std::weak_ptr<Wrapped> wrapped_;
};

}  // namespace torchspan::data_parallel

namespace torchspan {
using data_parallel::DataParallelOptions;
using data_parallel::JoinOptions;
using data_parallel::OnUnreducedBackward;
}  // namespace torchspan
