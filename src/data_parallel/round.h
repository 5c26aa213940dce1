#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/reducer_context.h"
#include "data_parallel/round_gradients.h"

namespace torchspan::data_parallel {

/// One reduction of all buckets, from the first mark of a backward pass to the end of the pass. Several
/// passes may fill one round, one after the other. Decides once whether this rank concludes the round or
/// gives it up; then exchanges the status, after which all ranks succeed or none. Guarded by the reducer's lock, under which
/// nothing runs. Its methods need the reducer's context.
class Round final : public std::enable_shared_from_this<Round> {
 public:
  /// `delayed`: reduces everything when the pass's work is over, as a static graph's first round does.
  Round(ReducerContext& context, const ForwardPtr& record, engine::GradientSink& sink, bool delayed);
  /// A round for which this rank has no gradients.
  Round(ReducerContext& context, const RoundTerms& terms, bool delayed);
  ~Round();
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  RoundGradients& gradients() { return gradients_; }

  // The passes that fill it:
  bool is_delayed() const { return delayed_; }
  /// The pass of `sink` goes through a mark of `record`. True if the pass is new to this round. Throws
  /// Error{kInvalid} if another pass is running.
  bool enter(engine::GradientSink& sink, const ForwardPtr& record);
  /// Whether a pass of this round has gone through outputs of that forward.
  bool reduces(const ForwardPtr& record) const;
  /// Whether passes have gone through all outputs of the round's forwards.
  bool all_passed() const;
  /// Finds unused parameters at the end: among those that no forward's outputs reach, because other forwards may use
  /// them, or among `all`, because a pass through a derivative of the outputs does not use all that they reach.
  void defer_unused(bool all);
  bool defers_unused() const;
  /// Slots that the pass does not use, as known at its end.
  std::vector<std::size_t> unreached() const;
  /// Ends the part of the running pass; others follow.
  void pause();
  /// Of the running pass; null between passes, without one, or after give_up().
  engine::GradientSink* sink() const;

  // Its end, for this rank:
  /// Records `reason`, unless one is recorded, in case this rank gives up.
  void note_reason(const std::string& reason);
  std::string reason() const;
  /// This rank gives the round up. False if it is concluding or given up already. conclude_with_zeros()
  /// must follow.
  bool give_up(const std::string& reason);
  /// Launches the other buckets with zeros and concludes. `runs_forwards`: false for a rank without batches, whose count
  /// of forwards does not matter. Throws if this rank cannot stay in step with the others.
  void conclude_with_zeros(bool runs_forwards = true);
  /// Sends the status after the last bucket, once. The end of the pass then waits for the outcome.
  void conclude();

  /// Whether neither conclude() nor give_up() was called, and a pass is running.
  bool is_open() const;
  bool is_given_up() const;
  bool is_concluded() const;

  // After conclude():
  /// Completes when this rank knows the outcome.
  Future<void> reduced() const;
  /// Completes at the end of the pass that waits for the outcome.
  Future<void> written_back() const;
  void set_written_back();
  /// If the round succeeded, writes the averages to the sink and installs rebuilt buckets.
  void finish_pass();
  void install_rebuilt();

 private:
  class Conclusion;

  ReducerContext& context_;
  const RoundTerms terms_;
  const bool delayed_;
  const std::optional<c10::Stream> pass_stream_;  // of the first pass
  RoundGradients gradients_;
  std::vector<ForwardPtr> records_ TORCHSPAN_GUARDED_BY(context_.mutex);
  engine::GradientSink* sink_ TORCHSPAN_GUARDED_BY(context_.mutex) = nullptr;
  engine::GradientSink* abandoned_ TORCHSPAN_GUARDED_BY(context_.mutex) =
      nullptr;  // sink of a round given up
  std::shared_ptr<engine::PassEnd> end_ TORCHSPAN_GUARDED_BY(context_.mutex);
  std::string reason_ TORCHSPAN_GUARDED_BY(context_.mutex);
  bool runs_forwards_ TORCHSPAN_GUARDED_BY(context_.mutex) = true;
  bool deferred_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  bool all_deferred_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  bool given_up_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  bool concluding_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  std::unique_ptr<Conclusion> conclusion_ TORCHSPAN_GUARDED_BY(context_.mutex);
  std::optional<Promise<void>> written_back_ TORCHSPAN_GUARDED_BY(context_.mutex);
};

}  // namespace torchspan::data_parallel
