#include "state/api/place.h"

#include <gtest/gtest.h>
#include <random>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

namespace torchspan::state::place_test {

std::int64_t product(const Sizes& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

Sizes random_shape(std::mt19937_64& random) {
  Sizes shape;
  for (std::uint64_t dims = random() % 5; dims > 0; --dims)
    shape.push_back(1 + static_cast<int>(random() % 4));
  return shape;
}

std::pair<std::int64_t, std::int64_t> random_range(std::mt19937_64& random, std::int64_t count) {
  auto begin = static_cast<std::int64_t>(random() % (count + 1)),
       end = static_cast<std::int64_t>(random() % (count + 1));
  return std::minmax(begin, end);
}

at::Tensor at_box(const at::Tensor& whole, const Box& box) {
  at::Tensor part = whole;
  for (std::size_t i = 0; i < box.size.size(); ++i)
    part = part.narrow(static_cast<std::int64_t>(i), box.offset[i], box.size[i]);
  return part;
}

/// The elements of the boxes, one after the other.
at::Tensor gathered(const at::Tensor& whole, const std::vector<Box>& boxes) {
  std::vector<at::Tensor> parts{at::empty({0}, whole.options())};
  for (const Box& box : boxes) parts.push_back(at_box(whole, box).reshape({-1}));
  return at::cat(parts);
}

RanksPtr no_ranks() { return nullptr; }

TEST(Boxes, HoldTheElementsOfTheRangeInOrder) {
  std::mt19937_64 random(4711);
  for (int trial = 0; trial < 2000; ++trial) {
    const Sizes shape = random_shape(random);
    const std::int64_t count = product(shape);
    const auto [begin, end] = random_range(random, count);
    const auto boxes = boxes_of(shape, begin, end);
    EXPECT_LE(boxes.size(), 2 * std::max<std::size_t>(shape.size(), 1) - 1);
    const at::Tensor found = gathered(at::arange(count).reshape(shape), boxes);
    ASSERT_TRUE(at::equal(found, at::arange(begin, end)))
        << "trial " << trial << ", shape " << at::IntArrayRef(shape);
  }
}

TEST(Places, OfARangeOfAPartNameItsElementsOfTheWholeTensor) {
  std::mt19937_64 random(4712);
  for (int trial = 0; trial < 1000; ++trial) {
    const Sizes shape = random_shape(random);
    Sizes offset, size;
    for (const std::int64_t all : shape) {
      offset.push_back(static_cast<std::int64_t>(random() % all));
      size.push_back(1 + static_cast<std::int64_t>(random() % (all - offset.back())));
    }
    const at::Tensor whole = at::arange(product(shape)).reshape(shape);
    auto part = std::make_shared<Place>(part_of(shape, offset, size, no_ranks()));
    at::Tensor elements = at_box(whole, part->boxes.front()).contiguous();
    for (int depth = 0; depth < 3; ++depth) {
      const auto [begin, end] = random_range(random, elements.numel());
      part = std::make_shared<Place>(range_of(part, elements.sizes().vec(), begin, end, no_ranks()));
      elements = elements.view({-1}).narrow(0, begin, end - begin).contiguous();
      EXPECT_EQ(part->shape, shape);
      ASSERT_EQ(part->count(), elements.numel()) << "trial " << trial;
      ASSERT_TRUE(at::equal(gathered(whole, part->boxes), elements)) << "trial " << trial;
      for (std::size_t i = 0; i < part->boxes.size(); ++i)
        EXPECT_TRUE(at::equal(box_in(elements, *part, i), at_box(whole, part->boxes[i])));
    }
    EXPECT_EQ(part->among.size(), 4U);
  }
}

PlacePtr marked(std::int64_t number) { return std::make_shared<Place>(Place{.shape = {number}}); }

TEST(Places, AreSharedByAllHandlesAndStayWhenTheTensorIsConvertedOrHooksAreRegistered) {
  const at::Tensor parameter = at::ones({3}).requires_grad_();
  EXPECT_EQ(place_of(parameter), nullptr);
  set_place(parameter, marked(1));
  const std::vector<at::Tensor> handles{parameter};
  const at::Tensor& other = handles.front();
  EXPECT_EQ(place_of(other)->shape, Sizes{1});
  int calls = 0;
  other.register_hook([&calls](const at::Tensor&) { ++calls; });
  other.set_data(parameter.detach().to(at::kDouble));
  set_place(parameter, marked(2));
  EXPECT_EQ(place_of(other)->shape, Sizes{2});
  (other * 3).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(parameter.grad(), at::full({3}, 3, at::kDouble)));
  EXPECT_EQ(place_of(parameter.detach()), nullptr);
  EXPECT_EQ(place_of(parameter.clone()), nullptr);
  set_place(parameter, nullptr);
  EXPECT_EQ(place_of(parameter), nullptr);
  parameter.mutable_grad().reset();
  (parameter * 2).sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST(Places, OfBuffersAndFrozenParametersAllowTrainingAndHooksLater) {
  const at::Tensor frozen = at::ones({2});
  set_place(frozen, marked(1));
  EXPECT_FALSE(frozen.requires_grad());
  EXPECT_EQ(place_of(frozen)->shape, Sizes{1});
  frozen.requires_grad_();
  int calls = 0;
  frozen.register_hook([&calls](const at::Tensor&) { ++calls; });
  (frozen * 2).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(place_of(frozen)->shape, Sizes{1});
  EXPECT_EQ(place_of(at::Tensor()), nullptr);
}

}  // namespace torchspan::state::place_test
