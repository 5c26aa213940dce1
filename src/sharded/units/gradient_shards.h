#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>

#include "sharded/units/flat_parameters.h"

namespace torchspan::sharded {

/// Gradients of one FlatParameters: whole ones come in, averages of this rank's parts go to `.grad`.
class GradientShards {
 public:
  explicit GradientShards(FlatParameters& parameters)
      : parameters_(parameters), used_(parameters.entries().size()) {}
  GradientShards(const GradientShards&) = delete;
  GradientShards& operator=(const GradientShards&) = delete;

  /// Adds whole gradients, undefined ones for parameters without, to a sum on this rank only.
  void add(const std::vector<at::Tensor>& gradients);
  /// Collective: starts the average over ranks of these and the sum that add() has.
  void reduce(const std::vector<at::Tensor>& gradients);
  /// Waits for the average that is running.
  void wait();
  /// Adds the averages to `.grad` of the parameters that a rank has used; `used` is by entry.
  void commit(const std::int32_t* used);

  bool has_sum() const { return sum_.defined(); }
  bool has_averages() const { return average_.defined(); }
  bool used(std::size_t entry) const { return used_[entry] != 0; }
  void drop();

 private:
  void collect(const at::Tensor& flat, const std::vector<at::Tensor>& gradients);

  FlatParameters& parameters_;
  std::vector<std::uint8_t> used_;  ///< by entry, since the last commit
  at::Tensor sum_;                  ///< whole gradients of passes that were not reduced
  at::Tensor sent_;                 ///< memory of the average that is running
  Future<at::Tensor> running_;
  at::Tensor average_;
};

}  // namespace torchspan::sharded
