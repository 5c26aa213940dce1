#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/passes/forward_log.h"
#include "data_parallel/reducer_parts.h"
#include "data_parallel/rounds/conclusion.h"
#include "data_parallel/rounds/round_gradients.h"

namespace torchspan::data_parallel {

struct RoundOptions {
  double divisor = 0;  ///< as in ForwardOptions
  int leader = 0;
  bool delayed = false;   ///< reduces everything when the pass's work is over: a static graph's first round
  bool deferred = false;  ///< finds unused parameters at the end: other forwards may use them
  bool shadow = false;    ///< as in RoundReport
};

/// One reduction of all buckets, from the first mark of a backward pass to the end of the pass. Several
/// passes may fill one round, one after the other. Decides once whether this rank concludes the round or
/// gives it up. Thread-safe; nothing runs under its lock. Its methods need the reducer's parts.
class Round {
 public:
  Round(ReducerParts& parts, const RoundOptions& options);
  Round(ReducerParts& parts, const RoundOptions& options, engine::GradientSink& sink,
        const ForwardLog::Record& record);
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  bool is_delayed() const { return options_.delayed; }
  bool is_deferred() const;
  RoundGradients& gradients() { return gradients_; }

  /// The pass of `sink` goes through a mark of `record`. True if the pass is new to this round. Throws
  /// Error{kInvalid} if another pass is running.
  bool enter(engine::GradientSink& sink, const ForwardLog::Record& record);
  /// Whether a pass of this round has gone through outputs of that forward.
  bool reduces(const ForwardLog::Record& record) const;
  /// Whether passes have gone through all outputs of the round's forwards.
  bool all_passed() const;
  /// Finds unused parameters at the end, among all of them: a pass through a derivative of the outputs does not use all
  /// parameters that the outputs reach.
  void defer_all();
  /// Slots that the pass does not use, as known at its end.
  std::vector<std::size_t> unreached() const;
  /// Ends the part of the running pass; others follow.
  void pause();
  /// Of the running pass; null between passes, without one, or after give_up().
  engine::GradientSink* sink() const;

  /// Records `reason`, unless one is recorded, in case this rank gives up.
  void note_reason(const std::string& reason);
  std::string reason() const;
  /// This rank gives the round up. False if it is concluding or given up already. conclude_with_zeros()
  /// must follow.
  bool give_up(const std::string& reason);
  /// Launches the other buckets with zeros and concludes. Throws if this rank cannot stay in step with the
  /// others.
  void conclude_with_zeros();
  /// Sends the status after the last bucket, once. The end of the pass then waits for the outcome.
  void conclude();

  /// Whether neither conclude() nor give_up() was called, and a pass is running.
  bool is_open() const;
  bool is_given_up() const;
  bool is_concluded() const;
  /// The outcome, after conclude().
  Future<void> finished() const;
  /// The end of the pass that waits for the outcome, after conclude().
  Future<void> over() const;
  /// If the round succeeded, writes the averages to the sink and installs rebuilt buckets.
  void finish_pass();
  void install_rebuilt();
  void set_over();

 private:
  ReducerParts& parts_;
  const RoundOptions options_;
  const std::optional<c10::Stream> pass_stream_;  // of the first pass
  RoundGradients gradients_;
  mutable Mutex mutex_;
  std::vector<ForwardLog::Record> records_ TORCHSPAN_GUARDED_BY(mutex_);
  engine::GradientSink* sink_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  engine::GradientSink* abandoned_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;  // sink of a round given up
  std::shared_ptr<engine::PassEnd> end_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string reason_ TORCHSPAN_GUARDED_BY(mutex_);
  bool all_deferred_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool given_up_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool concluding_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Conclusion> conclusion_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Promise<void>> over_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
