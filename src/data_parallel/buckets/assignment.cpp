#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel {
namespace {

struct OpenBucket {
  std::vector<std::size_t> indices;
  std::size_t bytes = 0;
  std::size_t limit = 0;  // which of the limits
};

void check(const std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& limits,
           const AssignmentOptions& options) {
  const auto refuse = [](const std::string& text) { throw Error(ErrorKind::kInvalid, text); };
  if (tensors.empty()) refuse("there are no tensors to put into buckets");
  if (limits.empty()) refuse("there is no size limit for buckets; give at least one");
  if (!options.sparse.empty() && options.sparse.size() != tensors.size()) {
    refuse(fmt::format("{} sparse flags for {} tensors", options.sparse.size(), tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) refuse(fmt::format("tensor {} is undefined", i));
    if (tensors[i].is_sparse())
      refuse(fmt::format("tensor {} is sparse; only its gradient may be sparse", i));
  }
  if (options.order.empty()) return;
  std::vector<bool> seen(tensors.size());
  for (const std::size_t index : options.order) {
    if (index >= tensors.size() || seen[index]) {
      refuse(
          fmt::format("the order of {} tensors has index {} twice or out of range", tensors.size(), index));
    }
    seen[index] = true;
  }
  if (options.order.size() != tensors.size()) {
    refuse(fmt::format("the order has {} indices for {} tensors", options.order.size(), tensors.size()));
  }
}

void sort_by_smallest_index(BucketAssignment& assignment) {
  std::vector<std::size_t> places(assignment.buckets.size());
  std::iota(places.begin(), places.end(), 0U);
  const auto smallest = [&](std::size_t place) {
    const auto& bucket = assignment.buckets[place];
    return *std::min_element(bucket.begin(), bucket.end());
  };
  std::sort(places.begin(), places.end(),
            [&](std::size_t a, std::size_t b) { return smallest(a) < smallest(b); });
  BucketAssignment sorted;
  for (const std::size_t place : places) {
    sorted.buckets.push_back(std::move(assignment.buckets[place]));
    sorted.limits.push_back(assignment.limits[place]);
  }
  assignment = std::move(sorted);
}

}  // namespace

BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& limits,
                                                   const AssignmentOptions& options) {
  check(tensors, limits, options);
  using Kind = std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>;
  std::map<Kind, OpenBucket> open;
  BucketAssignment assignment;
  const auto close = [&](OpenBucket& bucket) {
    assignment.buckets.push_back(std::exchange(bucket.indices, {}));
    assignment.limits.push_back(limits[bucket.limit]);
    bucket.limit = std::min(bucket.limit + 1, limits.size() - 1);
    bucket.bytes = 0;
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t index = options.order.empty() ? i : options.order[i];
    if (!options.sparse.empty() && options.sparse[index]) {
      assignment.buckets.push_back({index});
      assignment.limits.push_back(0);
      continue;
    }
    const at::Tensor& tensor = tensors[index];
    OpenBucket& bucket = open[{tensor.scalar_type(), tensor.device().type(), tensor.device().index()}];
    bucket.indices.push_back(index);
    bucket.bytes += tensor.nbytes();
    if (bucket.bytes >= limits[bucket.limit]) close(bucket);
  }
  std::vector<OpenBucket*> left;
  for (auto& [kind, bucket] : open) {
    if (!bucket.indices.empty()) left.push_back(&bucket);
  }
  std::vector<std::size_t> place(tensors.size());
  for (std::size_t i = 0; i < options.order.size(); ++i) place[options.order[i]] = i;
  std::sort(left.begin(), left.end(), [&](const OpenBucket* a, const OpenBucket* b) {
    return place[a->indices.back()] < place[b->indices.back()];
  });
  for (OpenBucket* bucket : left) close(*bucket);
  if (options.order.empty()) sort_by_smallest_index(assignment);
  return assignment;
}

}  // namespace torchspan::data_parallel
