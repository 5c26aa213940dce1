#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline.h>

namespace torchspan::pipeline {

/// What the uses of layers keep, by order and micro-batch.
using CacheTensors = std::map<std::pair<int, int>, std::vector<at::Tensor>>;

/// What a Cache holds on one worker.
class Cache::State {
 public:
  /// Throws Error{kInvalid} if another pipeline has used it. `next_number` counts the caches of the pipeline.
  void belong_to(std::uint64_t pipeline, std::int64_t& next_number);
  /// The same on all workers; -1 before belong_to().
  std::int64_t number() const { return number_; }
  /// Throws Error{kInvalid} unless the micro-batches have the rows of the first call.
  void check_rows(const std::vector<std::int64_t>& rows) const;
  /// A copy for the next call, which shares the tensors.
  CacheTensors tensors() const { return tensors_; }
  /// Ends a call that succeeded.
  void commit(CacheTensors tensors, std::vector<std::int64_t> rows);

 private:
  std::optional<std::uint64_t> pipeline_;
  std::int64_t number_ = -1;
  std::vector<std::int64_t> rows_;  ///< by micro-batch; empty: no call has succeeded
  CacheTensors tensors_;
};

}  // namespace torchspan::pipeline
