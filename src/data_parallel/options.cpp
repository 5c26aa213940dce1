#include <fmt/format.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/options.h>

namespace torchspan::data_parallel {

void DataParallelOptions::validate() const {
  const auto positive = [](double value, const std::string& name) {
    if (value > 0) return;
    throw Error(ErrorKind::kInvalid, fmt::format("{} is {}; it must be above 0", name, value));
  };
  positive(bucket_cap_mb, "bucket_cap_mb");
  positive(first_bucket_mb, "first_bucket_mb");
  for (std::size_t i = 0; i < bucket_cap_mb_list.size(); ++i)
    positive(bucket_cap_mb_list[i], fmt::format("bucket_cap_mb_list[{}]", i));
  if (static_graph && partial_backward) {
    throw Error(
        ErrorKind::kInvalid,
        "static_graph and partial_backward exclude each other: a static graph is learned from one whole "
        "backward pass");
  }
}

}  // namespace torchspan::data_parallel
