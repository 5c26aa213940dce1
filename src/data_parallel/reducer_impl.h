#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/time.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/passes.h"
#include "data_parallel/reducer_context.h"
#include "data_parallel/round.h"

namespace torchspan::data_parallel {

/// Marks the outputs of forwards, follows the backward passes through the marks, and reduces the gradients of each pass in a
/// round: begins it, feeds it, and ends it with the pass. Marks, hooks and passes hold it weakly, and call it on any thread.
class Reducer::Impl : public std::enable_shared_from_this<Reducer::Impl> {
 public:
  /// Collective.
  Impl(const Replicas& replicas, const collective::Group& group, DataParallelOptions options);
  /// Removes the hooks, gives up a running round and waits for its end.
  void close();
  ReducerContext& context() { return context_; }

  // On the thread that trains, between passes; see Reducer:
  void begin_forward();
  std::vector<at::Tensor> prepare(std::vector<at::Tensor> outputs, const ForwardOptions& options);
  void join_with_zeros(const RoundTerms& terms);
  void fail_next_round(const RoundTerms& terms, const std::string& reason);
  bool agree(bool ok, const BegunForwards& begun);
  /// Waits for the end of the last pass, and for a round that was given up. Returns the failure of the latter if the other
  /// ranks did not take part in it before the group's timeout.
  std::optional<Error> settle();

  // Events of a pass:
  /// It goes through a mark of a forward.
  void mark_reached(engine::GradientSink& sink, const ForwardPtr& record, Reached reached);
  /// The mark's graph is destroyed while an exception propagates on this thread, or was that of a layer of a pipeline.
  void mark_dropped(const ForwardPtr& record, std::size_t mark);
  /// It has finished the gradient of a slot, which may be undefined. An exception fails the pass.
  void gradient_ready(engine::GradientSink& sink, std::size_t slot);
  /// The round that passes fill; null if there is none.
  std::shared_ptr<Round> current() const;

  // For other reducers of the same parameters:
  /// Whether a reduction takes gradients now.
  bool is_reducing() const;
  /// Whether the pass came through an output of this wrapper, reduced or under no_sync.
  bool expects_gradients(const engine::GradientSink& sink) const;

 private:
  using RoundPtr = std::shared_ptr<Round>;
  /// In join(), agrees with the other ranks on the terms of the round that begins with this forward.
  void announce(const ForwardPtr& record);
  /// Throws Error{kInvalid}, on all ranks, if the last forward's passes left parameters without gradients.
  void fail_unfinished_round();
  /// Gives up the reduction of a forward whose outputs an exception discarded, unless that has been done.
  void fail_dropped();

  /// Begins a round for the pass. Returns the slots that the pass does not use.
  std::vector<std::size_t> begin_round(engine::GradientSink& sink, const ForwardPtr& record,
                                       bool others_unfinished) TORCHSPAN_REQUIRES(context_.mutex);
  void listen(engine::GradientSink& sink, const RoundPtr& round);
  /// Whether the slot gets no further gradient in this pass and is reduced now.
  bool is_complete(std::size_t slot) TORCHSPAN_REQUIRES(context_.mutex);
  /// Reduces what a static graph's first pass has recorded.
  void fill_recorded(Round& round);
  void work_over(const RoundPtr& round, const engine::PassStatus& status);
  void pass_over(const RoundPtr& round);

  void begin_local_pass(engine::GradientSink& sink);
  /// A gradient arrived, and no round takes it.
  void note_local(engine::GradientSink& sink, std::size_t slot);
  void forget_after(engine::GradientSink& sink);
  /// The pass is a stray one from this slot's gradient on.
  void report_stray(engine::GradientSink& sink, std::size_t slot);

  void give_up(const RoundPtr& round, const std::string& reason);
  /// Gives up a round whose passes so far left gradients for later passes. False if there is none.
  bool give_up_paused(const std::string& reason);
  /// A round for which this rank has no gradients: it sends zeros, so that the other ranks' passes end.
  RoundPtr begin_empty_round(const RoundTerms& terms);
  /// Ends a round that was given up. If this rank cannot stay in step, aborts the group.
  void end_given_up(Round& round);

  ReducerContext context_;
  const collective::Group parent_;
  std::optional<TimePoint> forward_began_;
  std::uint64_t agreed_rounds_ = 0;  // number of rounds at the last agree()
  std::uint64_t agreed_given_up_ = 0;
  RoundPtr round_ TORCHSPAN_GUARDED_BY(context_.mutex);
  bool accepting_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;  // a pass of round_ is running
  LocalPass local_ TORCHSPAN_GUARDED_BY(context_.mutex);
  StaticGraph graph_ TORCHSPAN_GUARDED_BY(context_.mutex);
  bool warned_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  Future<void> given_up_
      TORCHSPAN_GUARDED_BY(context_.mutex);  // the outcome of the last round that was given up
  std::string given_up_reason_ TORCHSPAN_GUARDED_BY(context_.mutex);
};

}  // namespace torchspan::data_parallel
