#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

namespace torchspan::data_parallel::assignment_test {
namespace {

using Lists = std::vector<std::vector<std::size_t>>;
using Sizes = std::vector<std::size_t>;

at::Tensor floats(int64_t count) { return at::empty({count}, at::kFloat); }
at::Tensor doubles(int64_t count) { return at::empty({count}, at::kDouble); }

// peer: ddp single_limit_single_dtype, single_limit_multi_dtype, multi_limit_single_dtype,
//   multi_limit_multi_dtype: same: index lists and limits
TEST(Assignment, OfOneLimitAndOneDtypeIsThePeers) {
  const auto result =
      compute_bucket_assignment_by_size({floats(100), floats(200), floats(100), floats(50)}, {400});
  EXPECT_EQ(result.buckets, (Lists{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(result.limits, (Sizes{400, 400, 400, 400}));
}

// peer: ddp single_limit_single_dtype
TEST(Assignment, OfOneLimitAndSeveralDtypesIsThePeers) {
  const auto result = compute_bucket_assignment_by_size(
      {floats(50), doubles(25), floats(50), doubles(25), floats(50), doubles(25)}, {400});
  EXPECT_EQ(result.buckets, (Lists{{0, 2}, {1, 3}, {4}, {5}}));
  EXPECT_EQ(result.limits, (Sizes{400, 400, 400, 400}));
}

// peer: ddp single_limit_single_dtype
TEST(Assignment, OfSeveralLimitsAndOneDtypeIsThePeers) {
  const auto result =
      compute_bucket_assignment_by_size({floats(10), floats(10), floats(10), floats(10)}, {40, 80});
  EXPECT_EQ(result.buckets, (Lists{{0}, {1, 2}, {3}}));
  EXPECT_EQ(result.limits, (Sizes{40, 80, 80}));
}

// peer: ddp single_limit_single_dtype
TEST(Assignment, OfSeveralLimitsAndSeveralDtypesIsThePeers) {
  const auto result = compute_bucket_assignment_by_size(
      {floats(50), doubles(25), floats(50), doubles(25), floats(50), doubles(25)}, {200, 400});
  EXPECT_EQ(result.buckets, (Lists{{0}, {1}, {2, 4}, {3, 5}}));
  EXPECT_EQ(result.limits, (Sizes{200, 200, 400, 400}));
}

TEST(Assignment, PutsSparseGradientsIntoSeparateBucketsWithoutALimit) {
  const auto result = compute_bucket_assignment_by_size({floats(10), floats(1000), floats(10)}, {400},
                                                        {.sparse = {false, true, false}});
  EXPECT_EQ(result.buckets, (Lists{{0, 2}, {1}}));
  EXPECT_EQ(result.limits, (Sizes{400, 0}));
}

TEST(Assignment, InAGivenOrderListsBucketsAsTheyAreFilled) {
  const auto result = compute_bucket_assignment_by_size({floats(10), floats(10), doubles(1), floats(10)},
                                                        {40, 80}, {.order = {3, 2, 1, 0}});
  EXPECT_EQ(result.buckets, (Lists{{3}, {1, 0}, {2}}));
  EXPECT_EQ(result.limits, (Sizes{40, 80, 40}));
}

// peer: ddp compute_bucket_assignment_by_size_sparse_error_*: same
TEST(Assignment, RejectsInvalidArguments) {
  const auto sparse = at::empty({3, 3}, at::TensorOptions().layout(at::kSparse));
  EXPECT_THROW(compute_bucket_assignment_by_size({}, {400}), Error);
  EXPECT_THROW(compute_bucket_assignment_by_size({floats(1)}, {}), Error);
  EXPECT_THROW(compute_bucket_assignment_by_size({floats(1), sparse}, {400}), Error);
  EXPECT_THROW(compute_bucket_assignment_by_size({floats(1)}, {400}, {.sparse = {true, false}}), Error);
  EXPECT_THROW(compute_bucket_assignment_by_size({floats(1), floats(1)}, {400}, {.order = {0, 0}}), Error);
  EXPECT_THROW(compute_bucket_assignment_by_size({floats(1), floats(1)}, {400}, {.order = {0}}), Error);
}

/// Checks the rule bucket by bucket.
TEST(Assignment, OfRandomTensorsKeepsTheRule) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<at::Tensor> tensors;
    const std::size_t count = 1 + random() % 30;
    for (std::size_t i = 0; i < count; ++i)
      tensors.push_back(random() % 2 ? floats(random() % 50) : doubles(random() % 50));
    const Sizes limits{1 + random() % 100, 1 + random() % 300};
    const auto result = compute_bucket_assignment_by_size(tensors, limits);
    std::vector<int> seen(count);
    std::map<at::ScalarType, std::size_t> nth;
    for (std::size_t b = 0; b < result.buckets.size(); ++b) {
      const auto dtype = tensors[result.buckets[b][0]].scalar_type();
      EXPECT_EQ(result.limits[b], limits[std::min<std::size_t>(nth[dtype]++, 1)]);
      std::size_t before_last = 0, bytes = 0;
      for (const std::size_t index : result.buckets[b]) {
        ++seen[index];
        EXPECT_EQ(tensors[index].scalar_type(), dtype);
        before_last = bytes;
        bytes += tensors[index].nbytes();
      }
      EXPECT_TRUE(std::is_sorted(result.buckets[b].begin(), result.buckets[b].end()));
      EXPECT_LT(before_last, result.limits[b]);
      if (b > 0) {
        EXPECT_LT(result.buckets[b - 1][0], result.buckets[b][0]);
      }
    }
    EXPECT_EQ(seen, std::vector<int>(count, 1));
  }
}

}  // namespace
}  // namespace torchspan::data_parallel::assignment_test
