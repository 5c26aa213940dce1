#include "sharded/state/flat_ranges.h"

#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

namespace torchspan::sharded::flat_ranges_test {

std::int64_t product(const Sizes& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

TEST(FlatRanges, BoxesHoldTheElementsOfTheRangeInOrder) {
  std::mt19937_64 random(4711);
  for (int trial = 0; trial < 2000; ++trial) {
    Sizes shape;
    for (std::uint64_t dims = random() % 5; dims > 0; --dims)
      shape.push_back(1 + static_cast<int>(random() % 4));
    const std::int64_t count = product(shape);
    std::int64_t begin = static_cast<std::int64_t>(random() % (count + 1));
    std::int64_t end = static_cast<std::int64_t>(random() % (count + 1));
    if (begin > end) std::swap(begin, end);
    const at::Tensor whole = at::arange(count).reshape(shape);
    std::vector<std::int64_t> found;
    const auto boxes = boxes_of({shape, begin, end});
    EXPECT_LE(boxes.size(), 2 * std::max<std::size_t>(shape.size(), 1) - 1);
    for (const AdjacentBox& box : boxes) {
      EXPECT_EQ(box.begin, begin + static_cast<std::int64_t>(found.size()));
      at::Tensor part = whole;
      for (std::size_t i = 0; i < shape.size(); ++i)
        part = part.narrow(static_cast<std::int64_t>(i), box.offset[i], box.size[i]);
      EXPECT_EQ(part.numel(), box.count);
      const at::Tensor flat = part.reshape({-1}).contiguous();
      for (std::int64_t i = 0; i < flat.numel(); ++i) found.push_back(flat[i].item<std::int64_t>());
    }
    std::vector<std::int64_t> wanted;
    for (std::int64_t i = begin; i < end; ++i) wanted.push_back(i);
    ASSERT_EQ(found, wanted) << "trial " << trial << ", shape " << at::IntArrayRef(shape);
  }
}

}  // namespace torchspan::sharded::flat_ranges_test
