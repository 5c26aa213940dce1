#pragma once
#include <string>

#include "pipeline/runtime/replica_begins.h"
#include "pipeline/runtime/replica_sums.h"
#include "pipeline/runtime/statistics_exchange.h"
#include "pipeline/runtime/tied_gradients.h"

namespace torchspan::pipeline {

/// What a step exchanges besides activations: gradients of tied parameters between stages, then gradients and
/// statistics between replicas. Used by the training thread.
class StepExchange {
 public:
  StepExchange(const LocalPipeline& local, const StepBegin& begin);

  /// Sets the gradients of earlier steps aside, once; before the first backward.
  void begin();
  /// A micro-batch's last backward through a layer range has ended.
  void backward_ended(int range) { sums_.backward_ended(range); }
  /// The last forward of this worker has ended.
  void forwards_ended() { statistics_.send(); }
  /// The last backward of this worker has ended.
  void backwards_ended();
  void accept(TiedGradient& event) { tied_.accept(event); }
  void accept(ReplicaGradients& event) { sums_.accept(event); }
  void accept(ReplicaStatistics& event) { statistics_.accept(event); }
  void accept(const ReplicaBegin& event);
  /// Does what the events so far allow. Returns whether everything that was begun is complete.
  bool advance();
  /// Puts the gradients of the step into `.grad`. Once all workers have run their parts: until then, the step may fail.
  void commit() { sums_.finish(); }
  /// What is missing, as in Awaited::name; null: nothing.
  const char* waiting_for() const;

 private:
  ReplicaBegins begins_;
  StatisticsExchange statistics_;
  ReplicaSums sums_;  ///< destroyed after `tied_`, whose gradients it sets aside as well
  TiedGradients tied_;
  bool begun_ = false;
  bool tying_ = false;  ///< waits for gradients of tied parameters
};

}  // namespace torchspan::pipeline
