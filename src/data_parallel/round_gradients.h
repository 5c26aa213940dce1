#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/reducer_context.h"
#include "data_parallel/streams.h"

namespace torchspan::data_parallel {

/// Gives gradients that are views of buckets memory that no reduction writes to: copies, or zeros.
void move_out_of_buckets(const ReducerContext& context, const Buckets& buckets, engine::GradientSink& sink,
                         bool keep_values);

/// The gradients of one round: each slot gets one, into its bucket; full buckets are reduced in order; the averages go back
/// to the pass. Different threads may put different slots. Guarded by the reducer's lock, under which nothing runs.
class RoundGradients {
 public:
  /// `in_place`: gradients become views of buckets, except those that another reducer reads too.
  RoundGradients(ReducerContext& context, std::uint64_t round, double divisor, bool in_place);
  RoundGradients(const RoundGradients&) = delete;
  RoundGradients& operator=(const RoundGradients&) = delete;

  std::uint64_t round() const { return round_; }

  // During the pass:
  /// Reserves the slot for its gradient. Throws Error{kInvalid} if it has one.
  void accept(std::size_t slot);
  /// Puts an accepted gradient, or zeros for an undefined one, into its bucket, and launches the bucket if it is full
  /// and its predecessors are launched. On devices, the gradients of a bucket are copied together when it is full. Throws
  /// Error{kInvalid} that names the parameter if the gradient does not fit.
  void put(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient);
  /// Puts the gradient of a slot that the pass does not use, unless it is accepted. It is restored if no rank uses it.
  void put_unused(engine::GradientSink& sink, std::size_t slot);
  /// Copies the gradients that buckets have so far: the program may change them when the pass is over.
  void copy_delayed(engine::GradientSink& sink);
  /// Slots that are not accepted.
  std::vector<std::size_t> missing() const;
  /// Parameters of the first replica in the order in which they were accepted.
  std::vector<std::uint32_t> order() const;

  // If this rank gives up:
  /// Launches no more full buckets.
  void stop();
  /// Gives gradients memory outside the buckets, with zeros.
  void leave_buckets(engine::GradientSink& sink) const;
  /// Launches the buckets that are left, with zeros.
  void launch_zeros();
  /// Whether a launch failed, or a bucket must not be written to: this rank then cannot stay in step with the
  /// others.
  bool is_broken() const;
  void set_broken();

  // After the last launch:
  void end_backward();
  /// Where a hook's futures run their continuations; expired without a hook, or if it completes at once.
  std::weak_ptr<ContinuationExecutor> hook_continuations() const;
  const std::vector<Future<at::Tensor>>& works() const { return works_; }
  /// Throws a hook's failure, or Error{kInvalid} for a result that does not fit its bucket.
  void check_hook_results() const;
  /// Writes the reduced buckets to the buckets of all replicas, on the reduction stream. Throws the first
  /// failure of a reduction.
  void take_results();
  /// What users of the results pass; null on the CPU.
  std::shared_ptr<const ValueGate> gate() const;
  /// For the message of a failure: the first bucket that failed; empty if none did.
  std::string failed_bucket() const;
  /// Writes the durations to the statistics, if this round is measured.
  void note_times();
  /// Writes the averages to the sink, except for parameters that no rank used. `used`: by parameter; empty: all.
  void write_back(engine::GradientSink& sink, const std::vector<std::uint8_t>& used) const;
  /// Moves gradients that are views of the buckets into `rebuilt`.
  void move_to(Buckets& rebuilt, engine::GradientSink& sink) const;

 private:
  /// Gradients of one bucket that were put on one stream, to be copied together.
  struct Delayed {
    c10::Stream stream;
    std::vector<std::size_t> slots;
    std::vector<at::Tensor> gradients;
  };
  struct Copies {
    std::vector<at::Tensor> to, from;
  };
  /// The factor of gradients when they are copied into a bucket.
  double factor(std::size_t bucket) const;
  /// Leaves a gradient to copy_bucket(). Returns false if it must be copied at once.
  bool delay(std::size_t slot, const at::Tensor& gradient);
  void copy_bucket(engine::GradientSink& sink, std::size_t bucket);
  /// Records the thread's current stream, and the time.
  void note_arrival(std::size_t bucket);
  void launch_full();
  void launch(std::size_t bucket);
  /// Starts the reduction of a bucket. Runs user code if there is a hook, which may throw.
  Future<at::Tensor> reduce(std::size_t bucket, bool given_up);
  /// Makes this thread's current stream wait for the gradients that are in the bucket.
  void wait_for_producers(std::size_t bucket);
  /// Whether the slot's gradient is a view of its bucket.
  bool is_view(std::size_t slot) const { return in_place_ && shared_[slot] == 0; }
  /// Writes an average to the sink, or adds the copy that does.
  void write_slot(engine::GradientSink& sink, std::size_t slot, Copies& copies) const;

  ReducerContext& context_;
  const std::uint64_t round_;
  const double divisor_;
  const bool in_place_;
  const bool measured_;  // all rounds of a traced run, else the first ten and every hundredth
  const std::shared_ptr<Buckets> buckets_;
  std::vector<Future<at::Tensor>> works_;          // by bucket
  std::vector<std::atomic<bool>> accepted_;        // by slot
  std::vector<std::atomic<std::uint32_t>> order_;  // of parameters
  std::atomic<std::size_t> ordered_{0};            // how many of them
  std::vector<std::atomic<std::size_t>> pending_;  // by bucket: slots without a gradient
  std::vector<std::uint8_t> shared_;               // by slot: another reducer reads the gradient
  std::optional<SpanScope> waiting_;               // from the end of backward to note_times()
  std::vector<std::uint8_t> full_ TORCHSPAN_GUARDED_BY(context_.mutex);             // by bucket
  std::vector<ProducerStreams> producers_ TORCHSPAN_GUARDED_BY(context_.mutex);     // by bucket
  std::vector<std::vector<Delayed>> delayed_ TORCHSPAN_GUARDED_BY(context_.mutex);  // by bucket
  std::vector<std::pair<std::size_t, at::Tensor>> kept_ TORCHSPAN_GUARDED_BY(context_.mutex);
  std::size_t next_ TORCHSPAN_GUARDED_BY(context_.mutex) = 0;  // the bucket that is launched next
  bool launching_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  bool stopped_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  bool broken_ TORCHSPAN_GUARDED_BY(context_.mutex) = false;
  std::optional<TimePoint> first_gradient_ TORCHSPAN_GUARDED_BY(context_.mutex);
  TimePoint last_gradient_ TORCHSPAN_GUARDED_BY(context_.mutex);
  TimePoint first_launch_ TORCHSPAN_GUARDED_BY(context_.mutex);
};

}  // namespace torchspan::data_parallel
