#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::data_parallel {

/// What a reducer has done and how long its last measured step took: the first ten reduced steps are
/// measured, then every hundredth. The measured times are also spans of the runtime.
struct ReducerStats {
  std::uint64_t forwards = 0;    ///< that were prepared for a reduction
  std::uint64_t reductions = 0;  ///< finished
  std::uint64_t aborted = 0;     ///< given up, here or by another rank
  std::uint64_t unused = 0;      ///< gradients this rank did not have, over all reductions
  bool rebuilt = false;          ///< buckets stand in the order of gradients
  std::vector<std::size_t> bucket_bytes;
  std::vector<std::vector<std::string>> bucket_parameters;
  std::vector<std::string> gradient_order;  ///< in which gradients came in the last reduction that had all

  std::uint64_t measured = 0;  ///< reductions
  Duration forward{};          ///< from begin_forward() to prepare_for_backward()
  Duration backward{};         ///< from the first gradient's arrival to the last's
  Duration communication{};    ///< from the first bucket's start to the last one's end
  Duration overlap{};          ///< the part of communication under which backward went on
};

}  // namespace torchspan::data_parallel
