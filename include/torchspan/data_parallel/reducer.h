#pragma once
// The Reducer, which averages gradients over the ranks of a group during a backward pass, with its options and its
// communication hooks. Includes no torch/nn.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/runtime.h>

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

namespace torchspan::data_parallel {

/// One bucket to reduce: undivided gradients of some of this rank's parameters.
struct GradientBucket {
  std::size_t index = 0;  ///< position in the order of reduction
  bool is_last = false;
  at::Tensor buffer;                    ///< flat, or one sparse gradient; the hook may overwrite it
  std::vector<at::Tensor> gradients;    ///< views of `buffer`, shaped like the parameters
  std::vector<std::string> parameters;  ///< parameter names
  std::vector<at::Tensor> parameter_tensors;
  double divisor = 1;  ///< turns a sum over all ranks into the average
  /// This rank has given up its backward pass: it sends zeros, and the reduction fails on all ranks.
  bool given_up = false;
};

/// Reduces one bucket over all ranks; the future's value is the average, shaped like `buffer` and possibly
/// the same tensor. Called in bucket order on the thread that runs backward, with no lock held; buckets
/// overlap. The hook must issue its operations on `group` before it returns, so that their order is the
/// same on all ranks. A failed future or a wrong result fails the backward pass on all ranks. An exception
/// also ends the reducer's group, because other ranks may be waiting inside the hook.
using CommHook =
    std::function<Future<at::Tensor>(const GradientBucket& bucket, const collective::Group& group)>;

/// Sums `buffer` / divisor over the ranks; the behavior without a hook.
CommHook all_reduce_hook();
/// Sends gradients as half or bfloat16, half the bytes of float; divides before sending.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();
/// Wraps another hook, which then receives and returns 16-bit buckets.
CommHook fp16_compress_wrapper(CommHook inner);
CommHook bf16_compress_wrapper(CommHook inner);

/// A buffer with its name in the module. Autograd does not track writes to this tensor.
struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

/// When a buffer hook runs. kBeforeForward: before the module's forward, which waits for the hook's
/// futures. kAfterForward: after it, so buffers are sent concurrently; backward does not end, and the next
/// forward does not begin, before the futures complete.
enum class BufferHookTime : std::uint8_t { kBeforeForward, kAfterForward };

/// Combines the ranks' buffers in place, instead of a broadcast from rank 0. Called for each reduced
/// forward on the training thread. The hook must issue its operations on `group` before it returns, the
/// same on all ranks. A failure of a returned future fails the forward, or the backward pass on all ranks.
/// An exception also ends the reducer's group, as with CommHook.
using BufferHook = std::function<std::vector<Future<at::Tensor>>(const std::vector<NamedBuffer>& buffers,
                                                                 const collective::Group& group)>;

struct PowerSgdOptions {
  int rank = 1;  ///< columns of the two factors that replace a gradient
  /// Reductions before the first compressed one; they send whole gradients.
  std::int64_t start_iteration = 1000;
  /// Gradients of n rows and m other elements are compressed if (n + m) * rank * this < n * m.
  double min_compression_rate = 2;
  bool error_feedback = true;  ///< adds what compression lost to the next gradient
  bool warm_start = true;      ///< begins with the factor of the last step instead of random numbers
  std::uint64_t seed = 0;      ///< of the random numbers
};

/// Sends two thin factors of a gradient instead of the gradient: P = MQ is summed over the ranks and
/// orthogonalized, then Q = M'P is averaged; PQ' is the average of M. Vogels et al., "PowerSGD", NeurIPS 2019.
/// One object per rank and wrapped module, with equal options on all ranks. Results have the same bits on
/// ranks with the same type of CPU or GPU.
class PowerSgd {
 public:
  /// Throws Error{kInvalid} that names an invalid option.
  explicit PowerSgd(PowerSgdOptions options = {});

  /// For register_comm_hook(); shares this object's state. backward() waits for the sum of P of each bucket,
  /// so a late rank delays it there. Sparse, integer and complex buckets are sent whole.
  CommHook hook() const;

  /// How many reductions have begun.
  std::int64_t iteration() const;
  /// Bytes that this rank passed to the group, and those of the gradients, since construction.
  struct Traffic {
    std::uint64_t sent = 0;
    std::uint64_t gradients = 0;
  };
  Traffic traffic() const;

  /// The iteration, and each parameter's factor and error, which differ between ranks: save them on each rank
  /// for an exact resumption. Call between steps.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Throws Error{kInvalid} that names an entry that does not belong to a state.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace torchspan::data_parallel

namespace torchspan {
using data_parallel::PowerSgd;
using data_parallel::PowerSgdOptions;
}  // namespace torchspan

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
