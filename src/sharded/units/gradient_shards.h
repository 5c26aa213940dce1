#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/function.h>

#include "sharded/units/flat_parameters.h"

namespace torchspan::sharded {

/// The reductions that run while backward goes on. Limits the memory of the gradients in them. Use it from one thread
/// at a time.
class ReductionQueue {
 public:
  using End = UniqueFunction<void()>;
  /// `limit`: bytes of gradients in running reductions when push() returns. `pool` counts them.
  ReductionQueue(std::size_t limit, std::shared_ptr<BufferPool> pool)
      : limit_(limit), pool_(std::move(pool)) {}

  /// Adds a reduction of `bytes`. `end` waits for it, stores its result, and frees its gradients. Ends the oldest
  /// reductions while there are more bytes than the limit.
  void push(std::size_t bytes, End end);
  void end_all();
  /// Forgets the reductions, after a failure.
  void clear();

 private:
  struct Running {
    std::size_t bytes;
    End end;
  };
  void end_oldest();

  const std::size_t limit_;
  const std::shared_ptr<BufferPool> pool_;
  std::deque<Running> running_;
  std::size_t bytes_ = 0;
};

/// Gradients of one FlatParameters: whole ones come in, averages of this rank's parts go to `.grad`. Each segment is
/// reduced separately.
class GradientShards {
 public:
  struct Terms {
    std::shared_ptr<ReductionQueue> queue;
    at::ScalarType dtype;                       ///< of sums and reductions
    std::optional<collective::Group> replicas;  ///< ranks with the same part of other copies of the model
  };

  GradientShards(FlatParameters& parameters, Terms terms);
  GradientShards(const GradientShards&) = delete;
  GradientShards& operator=(const GradientShards&) = delete;

  /// Throws Error{kUnsupported} for a sparse gradient.
  void check_dense(std::size_t entry, const at::Tensor& gradient) const;
  /// Adds a whole gradient to a sum on this rank, which the next reduction of its segment includes.
  void add(std::size_t entry, const at::Tensor& gradient);
  /// Collective: starts the average over ranks of a segment: the sum, and `gradients` of its parameters, undefined
  /// for none. Reduces from the memory of a gradient where it can.
  void reduce(std::size_t segment, std::vector<at::Tensor> gradients);
  void reduce_all();
  /// Adds the averages, which have ended, to `.grad` of the parameters that a rank has used; `used` is by entry.
  void commit(const std::int32_t* used);

  /// Whether there may be sums that no reduction includes so far: all ranks must then reduce all segments.
  bool has_sums() const { return has_sums_; }
  void set_has_sums(bool has_sums) { has_sums_ = has_sums; }
  const FlatParameters& parameters() const { return parameters_; }
  bool used(std::size_t entry) const { return used_[entry] != 0; }
  void drop();

 private:
  at::Tensor whole(const Segment& segment, at::Tensor sum, std::vector<at::Tensor> gradients) const;
  void keep(std::size_t segment, at::Tensor part, const at::Tensor& sent);

  FlatParameters& parameters_;
  const Terms terms_;
  const at::TensorOptions options_;   ///< of sums and reductions
  std::vector<std::uint8_t> used_;    ///< by entry: in reductions since the last commit
  std::vector<std::uint8_t> summed_;  ///< by entry: in sums_
  std::vector<at::Tensor> sums_;      ///< by segment: whole gradients that were not reduced; undefined: none
  std::vector<at::Tensor> averages_;  ///< by segment; undefined: none
  bool has_sums_ = false;
};

class GradientShards;
class Unit;

/// The whole gradients of one reduced backward through a unit, which arrive one at a time. Reduces the segments in an
/// order that all ranks have in common, whichever parameters they use: large parameters from the last to the first,
/// then the small ones. A segment is complete when its gradients have arrived; an unused parameter's never do.
class GradientStream {
 public:
  /// Takes the gradients that the unit has summed and not reduced. `alone`: no other units ran inside, so a segment is
  /// reduced when it and those before it are complete. Otherwise operations of the inner units would come in between at
  /// different places on ranks that use different parameters: segments are then reduced by pass_point() and finish().
  GradientStream(Unit& unit, bool alone);

  /// `trained`: index among the unit's trained parameters.
  void add(std::size_t trained, at::Tensor gradient);
  /// Collective, at the same places of a backward on all ranks: reduces the segments that were complete on all ranks of
  /// `group` at the point before, and asks them about those that are complete now. Nothing if the unit ran alone.
  void pass_point(const collective::Group& group);
  /// Reduces the segments that are left.
  void finish();
  /// No gradient came; the unit gets its unreduced sums back.
  void abandon();

 private:
  struct Step {
    GradientShards* gradients;
    std::size_t segment;
    std::size_t missing;
    std::vector<at::Tensor> arrived;  ///< by parameter of the segment
  };
  struct Place {
    std::size_t step, position, entry;
  };
  void reduce_next();
  /// How many segments, from the first on, are reduced or complete.
  std::size_t complete() const;

  const Unit& unit_;
  const bool alone_;
  std::vector<Step> steps_;
  std::vector<Place> places_;  ///< by trained parameter
  std::vector<GradientShards*> had_sums_;
  std::size_t next_ = 0;             ///< step
  Future<at::Tensor> all_complete_;  ///< complete() of the rank with the fewest, at the last point
};

}  // namespace torchspan::sharded
