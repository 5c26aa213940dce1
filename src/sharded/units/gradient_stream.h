#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::sharded {

class GradientShards;
class Unit;

/// The whole gradients of one reduced backward through a unit, which arrive one at a time. Reduces the segments in an
/// order that all ranks have in common, whichever parameters they use: large parameters from the last to the first,
/// then the small ones.
class GradientStream {
 public:
  /// Takes over the sums that the unit owes. `early`: a segment is reduced when its gradients and those of the segments
  /// before it have arrived, otherwise in finish(). Only units without others inside may reduce early: operations of
  /// the inner ones would come at different places on ranks that use different parameters.
  GradientStream(Unit& unit, bool early);

  /// `trained`: index among the unit's trained parameters.
  void add(std::size_t trained, at::Tensor gradient);
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

  const bool early_;
  std::vector<Step> steps_;
  std::vector<Place> places_;  ///< by trained parameter
  std::vector<GradientShards*> owed_;
  std::size_t next_ = 0;  ///< step
};

}  // namespace torchspan::sharded
