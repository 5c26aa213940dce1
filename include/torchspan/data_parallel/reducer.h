#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/time.h>
#include <torchspan/data_parallel/hooks.h>
#include <torchspan/data_parallel/options.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::data_parallel {

/// Counters of a reducer and durations of its last measured step. It measures the first ten reduced steps
/// and every hundredth after that; the durations are also recorded as spans of the runtime.
struct ReducerStats {
  std::uint64_t forwards = 0;    ///< forwards prepared for a reduction
  std::uint64_t reductions = 0;  ///< finished reductions
  std::uint64_t aborted = 0;     ///< aborted reductions, here or on another rank
  std::uint64_t unused = 0;      ///< gradients missing on this rank, over all reductions
  bool rebuilt = false;          ///< buckets follow the order of gradients
  std::vector<std::size_t> bucket_bytes;
  std::vector<std::vector<std::string>> bucket_parameters;
  std::vector<std::string> gradient_order;  ///< of the last reduction in which all gradients came

  std::uint64_t measured = 0;  ///< number of measured reductions
  Duration forward{};          ///< from begin_forward() to prepare_for_backward()
  Duration backward{};         ///< from the first gradient to the last
  Duration communication{};    ///< from the start of the first bucket to the end of the last
  Duration overlap{};          ///< communication during backward
};

/// What all ranks have in common in a reduction.
struct RoundTerms {
  double divisor = 0;  ///< of the sum over ranks; 0: their number
  int leader = 0;      ///< a rank that has gradients
};

/// Options of one forward for the backward passes that follow it.
struct ForwardOptions {
  bool synchronize = true;  ///< false: accumulate gradients on this rank
  RoundTerms terms = {};
  std::vector<Future<void>> awaited = {};  ///< the first reduced backward pass waits for these
  std::function<RoundTerms()> announce =
      nullptr;  ///< called before each reduction; an exception fails the pass
};

/// For Reducer::agree(): the reduced forwards that this rank has begun since the last call of it.
struct BegunForwards {
  std::int64_t count = 0;
  /// Starts what this rank sends in a forward that other ranks have begun, and returns at once; empty: nothing.
  std::function<void()> join = nullptr;
};

/// Averages gradients over the ranks of a group during backward; reduces a bucket when its last gradient is
/// ready, in the same order on all ranks. Works on an engine::GradientSink (`.grad` or an autograd
/// context). Each step: begin_forward(), the model, prepare_for_backward() on its outputs, backward from
/// the returned tensors; then gradients have the same bits on all ranks. A failure on one rank, or a
/// parameter without a gradient, fails the pass on all ranks with the reason; gradients are then invalid,
/// and the next step works. A broken group stays broken. Not thread-safe; hooks run on any thread.
class Reducer {
 public:
  using Replicas = std::vector<std::vector<Parameter>>;

  /// Collective. Throws Error{kInvalid} on every rank, naming the parameter, if ranks differ in names,
  /// order, dtypes, shapes, strides, sparseness, requires_grad or options, or if one rank's arguments are
  /// wrong, such as a tensor that is listed twice. Parameters without requires_grad are only compared. After
  /// the session of `group` has ended, calls fail with kCancelled.
  /// Gradients of several replicas in one process are summed, then averaged over ranks.
  Reducer(std::vector<Parameter> parameters, collective::Group group, DataParallelOptions options = {});
  Reducer(Replicas replicas, collective::Group group, DataParallelOptions options = {});
  /// Removes its hooks from the parameters and aborts a running reduction.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Begins a forward. If an exception discarded the previous forward's outputs before their backward,
  /// notifies the other ranks, which are waiting in their backward pass.
  void begin_forward();
  /// Returns stand-ins with the same values for all output tensors of a forward; backward must go through
  /// them. Waits for a reduction that another rank has not finished. All ranks must run their reduced
  /// forwards in the same order and equally often: a reduction between ranks with different counts fails on
  /// all of them.
  std::vector<at::Tensor> prepare_for_backward(std::vector<at::Tensor> outputs, ForwardOptions options = {});

  /// Reduces buckets with `hook`. Collective, once, before the first reduction; `name` must be the same on
  /// all ranks.
  void register_comm_hook(CommHook hook, std::string name);
  /// The buckets stay as they are: none are rebuilt in the order of gradients. All ranks, before the first
  /// reduction.
  void keep_buckets();

  /// Joins one reduction of the other ranks with zeros; local gradients are unchanged.
  void join_with_zeros(const RoundTerms& terms = {});
  /// Joins one reduction for a forward that has no backward pass here: the other ranks' passes fail with
  /// `reason`. Returns at once; settle() waits.
  void fail_next_round(const RoundTerms& terms, const std::string& reason);
  /// Resets the count of reduced forwards. All ranks must call it at the same point of the program.
  void restart_count();

  /// Collective, once per step: whether `ok` is true on all ranks. If not, the step is skipped: backward passes of forwards
  /// so far fail, on all ranks. All ranks call it at the same place of the program, before or after backward passes; with false,
  /// a rank may call it anywhere in the step instead. Uses the group of the constructor.
  bool agree(bool ok, const BegunForwards& begun = {});

  /// Waits until the other ranks have finished a reduction that was aborted here. Call it before using
  /// group(); a forward does so automatically.
  void settle();
  /// Number of reductions that have begun here.
  std::uint64_t rounds() const;
  /// Number of reductions that have succeeded.
  std::uint64_t reductions() const;

  ReducerStats stats() const;
  /// The reducer's private group.
  const collective::Group& group() const;

  class Impl;

 private:
  const OwnerProcess process_;
  std::shared_ptr<Impl> impl_;
};

/// Assignment of gradients to the buckets in which they are reduced together.
struct BucketAssignment {
  std::vector<std::vector<std::size_t>> buckets;  ///< tensor indices, by bucket
  std::vector<std::size_t> limits;                ///< bytes at which a bucket closes; 0: sparse, no limit
};

struct AssignmentOptions {
  std::vector<bool> sparse = {};  ///< whether each tensor's gradient is sparse; empty: none
  /// Order in which tensors are assigned, each index once; buckets keep the order in which they were
  /// opened. Empty: the given order, with buckets sorted by smallest index.
  std::vector<std::size_t> order = {};
};

/// Assigns tensors to buckets of one dtype and device. A bucket closes when it holds at least its limit in
/// bytes; the n-th bucket of a dtype and device uses limits[n], later ones the last limit. Tensors are
/// never split; a sparse one gets a bucket to itself. Deterministic: equal arguments give equal buckets on
/// all ranks. Throws Error{kInvalid} for no tensors, no limits, or options that do not match the tensors.
BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& limits,
                                                   const AssignmentOptions& options = {});

}  // namespace torchspan::data_parallel
