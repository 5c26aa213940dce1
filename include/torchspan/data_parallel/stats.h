#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::data_parallel {

/// Counters of a reducer and durations of its last measured step. It measures the first ten reduced steps
/// and every hundredth after that; the durations are also recorded as spans of the runtime.
struct ReducerStats {
  std::uint64_t forwards = 0;    ///< forwards prepared for a reduction
  std::uint64_t reductions = 0;  ///< finished reductions
  std::uint64_t aborted = 0;     ///< aborted reductions, here or on another rank
  std::uint64_t unused = 0;      ///< gradients missing on this rank, over all reductions
  bool rebuilt = false;          ///< buckets follow the order of gradients
  std::vector<std::size_t> bucket_bytes;
  std::vector<std::vector<std::string>> bucket_parameters;
  std::vector<std::string> gradient_order;  ///< of the last reduction in which all gradients came

  std::uint64_t measured = 0;  ///< number of measured reductions
  Duration forward{};          ///< from begin_forward() to prepare_for_backward()
  Duration backward{};         ///< from the first gradient to the last
  Duration communication{};    ///< from the start of the first bucket to the end of the last
  Duration overlap{};          ///< communication during backward
};

}  // namespace torchspan::data_parallel
