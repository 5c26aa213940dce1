#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>

namespace torchspan::sharded {

class GradientShards;
class Unit;

/// The whole gradients of one reduced backward through a unit, which arrive one at a time. Reduces the segments in an
/// order that all ranks have in common, whichever parameters they use: large parameters from the last to the first,
/// then the small ones. A segment is complete when its gradients have arrived; an unused parameter's never do.
class GradientStream {
 public:
  /// Takes over the sums that the unit owes. `alone`: no other units ran inside, so a segment is reduced when it and
  /// those before it are complete. Otherwise operations of the inner units would come in between at different places on
  /// ranks that use different parameters: segments are then reduced by pass_point() and finish().
  GradientStream(Unit& unit, bool alone);

  /// `trained`: index among the unit's trained parameters.
  void add(std::size_t trained, at::Tensor gradient);
  /// Collective, at the same places of a backward on all ranks: reduces the segments that were complete on all ranks of
  /// `group` at the point before, and asks them about those that are complete now. Nothing if the unit ran alone.
  void pass_point(const collective::Group& group);
  /// Reduces the segments that are left.
  void finish();
  /// No gradient came; the unit owes its sums again.
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
  std::vector<GradientShards*> owed_;
  std::size_t next_ = 0;             ///< step
  Future<at::Tensor> all_complete_;  ///< complete() of the rank with the fewest, at the last point
};

}  // namespace torchspan::sharded
