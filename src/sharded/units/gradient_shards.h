#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "sharded/units/flat_parameters.h"
#include "sharded/units/reduction_queue.h"

namespace torchspan::sharded {

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
  bool owes() const { return owes_; }
  void set_owes(bool owes) { owes_ = owes; }
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
  bool owes_ = false;
};

}  // namespace torchspan::sharded
