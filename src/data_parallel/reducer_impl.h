#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/buckets.h"
#include "data_parallel/forward_mark.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {

/// Where things stand in the status of a round, of which all ranks learn the maximum.
constexpr std::size_t kStatusGaveUp = 0, kStatusForwards = 1, kStatusMinusForwards = 2, kStatusUsed = 3;

/// One reduction of all buckets, from the first mark or gradient of its pass to the pass's end.
struct Round {
  std::uint64_t number = 0;
  bool counts = true;                    ///< this rank runs forwards, and tells how many
  std::int32_t forwards = 0;             ///< that it told
  engine::GradientSink* sink = nullptr;  ///< null: gradients are not to be touched (any more)
  std::shared_ptr<engine::PassEnd> end;
  std::vector<std::shared_ptr<ForwardRecord>> records;
  double divisor = 1;
  int leader = 0;
  bool in_place = false;             ///< gradients become views of buckets
  std::vector<std::uint8_t> shared;  ///< by slot: another reducer reads this gradient too, so it stays apart
  bool delayed = false;   ///< everything is reduced when the pass's work is over: a static graph's first
  bool deferred = false;  ///< unused parameters are told apart at the end: other forwards may use them

  std::vector<std::uint8_t> ready;   ///< by slot
  std::vector<std::size_t> pending;  ///< by bucket: slots that are still to be filled
  std::vector<std::uint32_t> order;  ///< parameters as their gradients came
  std::vector<std::pair<std::size_t, at::Tensor>>
      kept;              ///< gradients of slots that were not used, as they were
  std::size_t next = 0;  ///< the bucket to be launched next
  bool launching = false;
  bool broken = false;  ///< a launch failed half-way: the others cannot be kept in step
  bool concluding = false;
  bool concluded = false;  ///< the status is on its way, and `finished` is there
  bool aborted = false;
  std::string reason;
  std::exception_ptr failure;  ///< of a hook, on this rank

  std::vector<Future<at::Tensor>> works;  ///< by bucket
  Future<at::Tensor> status;
  std::optional<Promise<void>> promise;
  Future<void> finished;
  std::optional<Promise<void>> over;  ///< the pass has ended, and gradients are where they belong
  std::unique_ptr<Buckets> rebuilt;   ///< in the order of gradients: taken when the round is over

  bool measured = false;
  std::optional<TimePoint> first_gradient;
  TimePoint last_gradient, first_launch;
};

/// The state machine. Every method but the public ones of Reducer may run on a thread of a backward pass or
/// of the group; the mutex is never held while a tensor is touched, a bucket launched, or anything waited
/// for.
class Reducer::Impl final : public MarkListener, public std::enable_shared_from_this<Impl> {
 public:
  using RoundPtr = std::shared_ptr<Round>;
  Impl(Runtime& runtime, Replicas replicas, const collective::Group& group, DataParallelOptions options);
  ~Impl() override;

  /// Puts hooks on the parameters; once, when a shared_ptr owns this.
  void attach();
  /// Puts hooks on parameters that lost them with their gradient accumulators, as torch::load() makes them.
  void attach_again();
  /// Takes them off, gives up what is under way and waits for its end.
  void detach();

  void begin_forward();
  std::vector<at::Tensor> prepare(std::vector<at::Tensor> outputs, const ForwardOptions& options);
  void register_comm_hook(CommHook hook, const std::string& name);
  void shadow(const ForwardOptions& options);
  void refuse(const ForwardOptions& options, const std::string& reason);
  void restart_count();
  std::uint64_t rounds() const;
  void settle();
  ReducerStats stats() const;
  const collective::Group& group() const { return group_; }

  void mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                    std::size_t mark) override;
  void mark_dropped(const std::shared_ptr<ForwardRecord>& record) override;
  /// From the hook of a slot's parameter.
  void gradient_ready(engine::GradientSink& sink, std::size_t slot);
  /// Why the pass is about to fail: LibTorch's engine tells only that it did.
  void note_reason(const std::string& text);

 private:
  class SlotHook;

  // reducer.cpp
  std::unique_ptr<Buckets> make_buckets(const std::vector<std::size_t>& order) const;
  void note_buckets();
  void hook_slot(std::size_t slot);
  std::size_t slots() const { return replicas_.size() * count_; }
  const at::Tensor& tensor(std::size_t slot) const { return replicas_[slot / count_][slot % count_].tensor; }
  const std::string& name(std::size_t slot) const { return replicas_[slot / count_][slot % count_].name; }
  std::vector<std::size_t> unused_slots(const std::vector<at::Tensor>& outputs) const;
  /// This reducer for a continuation on the group's threads. detach() waits until all have been let go of, so
  /// that the last handle of the group never goes on a thread of the group, which could not end it.
  std::shared_ptr<Impl> hold();
  void await_holds();
  void refuse_unfinished_round();
  void refuse_dropped_forward();
  /// A reduction failed on all ranks, so none waits for those of earlier forwards.
  void forget_forwards() TORCHSPAN_REQUIRES(mutex_);
  void refuse_thawed_parameters() const;

  // passes.cpp: what a backward pass tells
  RoundPtr new_round(const ForwardOptions& options, engine::GradientSink* sink) TORCHSPAN_REQUIRES(mutex_);
  /// Slots whose gradients are there already, and those that will get none.
  struct Start {
    std::vector<std::size_t> arrived, unused;
  };
  Start begin_round(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record)
      TORCHSPAN_REQUIRES(mutex_);
  bool join_round(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record)
      TORCHSPAN_REQUIRES(mutex_);
  void announce(const std::shared_ptr<ForwardRecord>& record);
  void hold_awaited(engine::GradientSink& sink, ForwardRecord& record);
  void listen(engine::GradientSink& sink, const RoundPtr& round);
  void listen_locally(engine::GradientSink& sink);
  /// Slots whose gradients came in this pass before it was known to be one that reduces.
  std::vector<std::size_t> take_arrived(const engine::GradientSink& sink) TORCHSPAN_REQUIRES(mutex_);
  bool reaches_parameters() const;
  /// Null: the gradient is not, or not yet, to be reduced. Sets `stray` when it is the first of a pass that
  /// no mark has told of.
  RoundPtr admit(const engine::GradientSink& sink, std::size_t slot, bool& stray) TORCHSPAN_REQUIRES(mutex_);
  void listen_to_stray(engine::GradientSink& sink, std::size_t slot);
  /// Whether another reducer averages the gradient too; throws when it does so now, over other ranks.
  bool is_shared(std::size_t slot) const;
  bool is_reducing() const;
  void fill(const RoundPtr& round, engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient);
  void fill_unused(const RoundPtr& round, engine::GradientSink& sink, std::size_t slot);
  void note_unwrapped(std::size_t slot);
  void work_over(const RoundPtr& round, const engine::PassStatus& status);
  void end_delayed(const RoundPtr& round);
  void end_deferred(const RoundPtr& round);
  std::vector<std::size_t> missing(const RoundPtr& round) const;
  std::string missing_text(const std::vector<std::size_t>& slots) const;
  /// Why no pass can come to the slot, or empty.
  std::string why_unreachable(std::size_t slot) const;

  // launching.cpp: buckets on their way
  /// Whether the group divides, rather than we.
  bool averages(const Round& round, std::size_t bucket) const;
  double factor(const Round& round, std::size_t bucket) const;
  void launch_full_buckets(const RoundPtr& round);
  void launch(Round& round, std::size_t bucket);
  GradientBucket as_hook_sees(const Round& round, std::size_t bucket);
  /// Lets the others finish with nothing from here; `reason` is told to them.
  void give_up(const RoundPtr& round, const std::string& reason);
  void end_without_us(const RoundPtr& round);
  /// Gives gradients memory of their own: the others' reduction still writes to the buckets.
  void leave_buckets(engine::GradientSink& sink, bool keep);
  void launch_the_rest_empty(const RoundPtr& round);
  RoundPtr round_without_pass(const ForwardOptions& options, const std::string& refusal);

  // concluding.cpp: from launched buckets to averaged gradients
  /// The pass is about to end: so says whether this rank gives up, and the others' word decides.
  void decide(const RoundPtr& round, const engine::PassStatus& status);
  void conclude(const RoundPtr& round);
  /// Waits for one hook's answer after the other: the status comes after all that hooks send.
  void await_hooks(const RoundPtr& round, std::size_t bucket);
  void send_status(Round& round);
  void check_hooks(Round& round);
  void finish(const RoundPtr& round);
  void set_failure(Round& round);
  void count_finished(Round& round);
  void hear_why(const RoundPtr& round, int rank);
  void hear_counts(const RoundPtr& round);
  void rebuild(const RoundPtr& round);
  void build_in(const RoundPtr& round, const at::Tensor& order);
  void note_unbuilt(int rank, const std::string& reason);

  // writing_back.cpp: at the end of the pass
  void pass_over(const RoundPtr& round);
  void write_back(Round& round);
  void write_slot(Round& round, std::size_t slot);
  void move_into_rebuilt(Round& round);

  Runtime& runtime_;
  const Replicas replicas_;  ///< those parameters that need gradients
  const std::size_t count_;  ///< of parameters in one replica
  const DataParallelOptions options_;
  const collective::Group group_;
  const bool tracks_use_;
  std::vector<at::Tensor> frozen_;  ///< the first replica's other parameters
  std::vector<std::string> frozen_names_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> slot_of_;
  const std::shared_ptr<engine::NativeEnginePasses> passes_ = std::make_shared<engine::NativeEnginePasses>();
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooked_;
  CommHook hook_;                     ///< set before the first reduction, by the thread that trains
  std::unique_ptr<Buckets> buckets_;  ///< changed between reductions only
  bool rebuilt_ = false;
  /// int32 by kStatus…: 1 + the rank that gave up, the numbers of forwards, which parameters were used; in
  /// shared memory.
  at::Tensor status_;

  mutable Mutex mutex_;
  RoundPtr round_ TORCHSPAN_GUARDED_BY(mutex_);
  Future<void> given_up_ TORCHSPAN_GUARDED_BY(mutex_);  ///< the end of a round that has no pass any more
  std::vector<std::weak_ptr<ForwardRecord>> outstanding_ TORCHSPAN_GUARDED_BY(mutex_);
  /// A pass that reduces nothing, as far as is known: under no_sync, or, when `stray_`, one that has not come
  /// through a mark.
  std::shared_ptr<engine::PassEnd> local_end_ TORCHSPAN_GUARDED_BY(mutex_);
  bool stray_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::vector<std::uint8_t> fired_locally_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by slot, in that pass
  std::vector<std::uint8_t> used_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by parameter, since the last reduction
  std::vector<std::uint32_t> firings_ TORCHSPAN_GUARDED_BY(mutex_);    ///< static graph: by slot, in one pass
  std::vector<std::uint32_t> remaining_ TORCHSPAN_GUARDED_BY(mutex_);  ///< the same, still to come
  std::vector<std::uint32_t> fired_last_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint32_t firing_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool graph_known_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool warned_unwrapped_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::size_t holds_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Parker* awaits_holds_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::uint64_t rounds_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::int32_t forwards_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< reduced ones; the same on all ranks
  /// A forward whose outputs an exception took before a pass came through them.
  std::shared_ptr<ForwardRecord> dropped_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<TimePoint> forward_began_ TORCHSPAN_GUARDED_BY(mutex_);
  ReducerStats stats_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
