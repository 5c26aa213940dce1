#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/passes/forward_mark.h"
#include "data_parallel/passes/local_pass.h"
#include "data_parallel/passes/slot_hooks.h"
#include "data_parallel/passes/static_graph.h"
#include "data_parallel/reducer_parts.h"
#include "data_parallel/rounds/empty_rounds.h"
#include "data_parallel/rounds/round.h"

namespace torchspan::data_parallel {

/// Follows backward passes by their marks and gradients, and reduces each in a round: begins it, feeds it,
/// and ends it with the pass. Held by a shared_ptr; its callbacks hold it weakly. They run on any thread.
class PassReducer final : public MarkListener,
                          public SlotListener,
                          public std::enable_shared_from_this<PassReducer> {
 public:
  explicit PassReducer(std::shared_ptr<ReducerParts> parts);
  /// Removes the hooks, gives up a running round and waits for its end.
  void close();

  // Between passes:
  /// Waits for the end of the last pass, and for a round that was given up. Returns the failure of the latter if the other
  /// ranks did not take part in it before the group's timeout.
  std::optional<Error> settle();
  /// In join(), agrees with the other ranks on the terms of the round that begins with this forward.
  void announce(const ForwardLog::Record& record);
  /// Throws Error{kInvalid}, on all ranks, if the last forward's passes left parameters without gradients.
  void refuse_unfinished_round();
  void shadow(const ForwardOptions& options);
  void refuse(const ForwardOptions& options, const std::string& reason);
  /// Gives up the reduction of a forward whose outputs an exception discarded, unless that has been done.
  void refuse_dropped();
  /// Gives up a round whose passes so far left gradients for later passes. False if there is none.
  bool give_up_paused(const std::string& reason);

  void mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                    Reached reached) override;
  void mark_dropped(const std::shared_ptr<ForwardRecord>& record, std::size_t mark) override;
  void gradient_ready(engine::GradientSink& sink, std::size_t slot) override;
  void gradient_failed(const std::string& text) override;
  bool is_reducing() const override;
  bool expects_gradients(const engine::GradientSink& sink) const override;
  const std::vector<int>& ranks() const override { return parts_->group.ranks(); }

 private:
  using RoundPtr = std::shared_ptr<Round>;
  /// Slots whose gradients arrived before the round began, and slots that the pass does not use.
  struct Start {
    std::vector<std::size_t> arrived, unused;
  };
  RoundPtr current() const;
  RoundOptions round_options(const ForwardOptions& options) const;
  Start begin_round(engine::GradientSink& sink, const ForwardLog::Record& record, bool others_unfinished)
      TORCHSPAN_REQUIRES(mutex_);
  void begin_local_pass(engine::GradientSink& sink);
  /// A gradient arrived, and no round takes it.
  void note_local(engine::GradientSink& sink, std::size_t slot);
  void listen(engine::GradientSink& sink, const RoundPtr& round);
  void forget_after(engine::GradientSink& sink);
  void watch_stray(engine::GradientSink& sink, std::size_t slot);
  void report_stray(std::size_t slot);
  /// Whether the slot gets no further gradient in this pass and is reduced now.
  bool is_complete(std::size_t slot) TORCHSPAN_REQUIRES(mutex_);
  /// Reduces what a static graph's first pass has recorded.
  void fill_recorded(Round& round);
  void work_over(const RoundPtr& round, const engine::PassStatus& status);
  void decide(const RoundPtr& round, const engine::PassStatus& status);
  void pass_over(const RoundPtr& round);
  void give_up(const RoundPtr& round, const std::string& reason);

  const std::shared_ptr<ReducerParts> parts_;
  EmptyRounds empty_;
  mutable Mutex mutex_;
  RoundPtr round_ TORCHSPAN_GUARDED_BY(mutex_);
  bool accepting_ TORCHSPAN_GUARDED_BY(mutex_) = false;  // a pass of round_ is running
  LocalPass local_ TORCHSPAN_GUARDED_BY(mutex_);
  StaticGraph graph_ TORCHSPAN_GUARDED_BY(mutex_);
  bool warned_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::data_parallel
