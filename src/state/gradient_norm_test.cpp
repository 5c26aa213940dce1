#include "state/api/gradient_norm.h"

#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

namespace torchspan::state::gradient_norm_test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Ranks whose other members have these numbers.
class FixedRanks final : public Ranks {
 public:
  FixedRanks(int level, std::vector<std::vector<double>> others)
      : level_(level), others_(std::move(others)) {}
  const std::string& identity() const override { return identity_; }
  int level() const override { return level_; }
  int rank() const override { return 0; }
  void reduce(std::vector<double>& numbers, bool maximum) const override {
    received.push_back(numbers);
    for (const auto& other : others_) {
      ASSERT_EQ(other.size(), numbers.size());
      for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = maximum ? std::max(numbers[i], other[i]) : numbers[i] + other[i];
    }
  }
  mutable std::vector<std::vector<double>> received;

 private:
  const int level_;
  const std::vector<std::vector<double>> others_;
  const std::string identity_ = fmt::format("{}", fmt::ptr(this));
};

PlacedGradient divided(double value, std::vector<RanksPtr> among) {
  return {at::full({1}, value, at::kDouble),
          std::make_shared<Place>(Place{.divided = true, .among = std::move(among)})};
}

TEST(NormOverPlaces, CountsWhatIsWholeOnceAndWhatIsDividedOnAllRanks) {
  const auto tensor_parallel =
      std::make_shared<FixedRanks>(kTensorParallel, std::vector<std::vector<double>>{{9}, {16}});
  const std::vector<PlacedGradient> gradients{
      divided(2, {tensor_parallel}), {at::full({1}, 1, at::kDouble), nullptr}, {at::Tensor(), nullptr}};
  EXPECT_DOUBLE_EQ(norm_over_places(gradients, 2), std::sqrt(4 + 9 + 16 + 1));
  EXPECT_EQ(tensor_parallel->received, (std::vector<std::vector<double>>{{4}}));
}

TEST(NormOverPlaces, ReducesOverInnerRanksFirstAndOverEachRanksOnce) {
  // Of the sharded ranks, the others' numbers already contain those of their tensor-parallel ranks.
  const auto inner =
      std::make_shared<FixedRanks>(kTensorParallel, std::vector<std::vector<double>>{{10, 20}});
  const auto outer = std::make_shared<FixedRanks>(kDataParallel, std::vector<std::vector<double>>{{100}});
  const std::vector<PlacedGradient> gradients{divided(1, {outer}), divided(2, {inner, outer}),
                                              divided(3, {inner, outer}), divided(4, {inner})};
  const double whole = 1 + (4 + 9 + 20) + 100 + (16 + 10);
  EXPECT_DOUBLE_EQ(norm_over_places(gradients, 2), std::sqrt(whole));
  EXPECT_EQ(inner->received, (std::vector<std::vector<double>>{{16, 13}}));
  EXPECT_EQ(outer->received, (std::vector<std::vector<double>>{{1 + 13 + 20}}));
}

TEST(NormOverPlaces, OfTheLargestElementTakesTheMaximum) {
  const auto ranks = std::make_shared<FixedRanks>(kDataParallel, std::vector<std::vector<double>>{{7}});
  EXPECT_EQ(norm_over_places({divided(-3, {ranks})}, kInfinity), 7);
  EXPECT_EQ(norm_over_places({divided(-9, {ranks})}, kInfinity), 9);
}

TEST(NormOverPlaces, ReducesZerosOnRanksWithoutGradients) {
  const auto ranks = std::make_shared<FixedRanks>(kDataParallel, std::vector<std::vector<double>>{{25}});
  PlacedGradient nothing = divided(1, {ranks});
  nothing.gradient = at::Tensor();
  EXPECT_EQ(norm_over_places({nothing}, 2), 5);
  EXPECT_EQ(norm_over_places({}, 2), 0);
}

TEST(NormOverPlaces, LeavesOutRepeatedTensorsAndKeepsNaN) {
  const auto place = std::make_shared<Place>(Place{.repeated = true});
  EXPECT_EQ(
      norm_over_places({{at::full({1}, 3, at::kDouble), nullptr}, {at::full({1}, 4, at::kDouble), place}}, 2),
      3);
  EXPECT_TRUE(std::isnan(norm_over_places({{at::full({2}, std::nan(""), at::kDouble), nullptr}}, kInfinity)));
}

TEST(GradientsAtPlaces, HasEachParameterOnce) {
  const at::Tensor parameter = at::ones({2}).requires_grad_(), unused = at::ones({2}).requires_grad_();
  parameter.sum().backward();
  set_place(unused, std::make_shared<Place>(Place{.own = true}));
  const auto gradients = gradients_at_places({parameter, unused, parameter});
  ASSERT_EQ(gradients.size(), 2U);
  EXPECT_TRUE(gradients[0].gradient.defined());
  EXPECT_FALSE(gradients[1].gradient.defined());
  EXPECT_TRUE(gradients[1].place->own);
}

TEST(OnAnyRank, AsksAllRanksOfThePlaces) {
  const auto inner = std::make_shared<FixedRanks>(kTensorParallel, std::vector<std::vector<double>>{{0}});
  const auto outer = std::make_shared<FixedRanks>(kDataParallel, std::vector<std::vector<double>>{{1}});
  EXPECT_FALSE(on_any_rank({divided(1, {inner})}, false));
  EXPECT_TRUE(on_any_rank({divided(1, {inner})}, true));
  EXPECT_TRUE(on_any_rank({divided(1, {outer, inner})}, false));
}

}  // namespace torchspan::state::gradient_norm_test
