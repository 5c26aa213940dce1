#include "elastic/sample_dealer.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

#include "tests/support/errors.h"

namespace torchspan::elastic::sample_dealer_test {
namespace {

using torchspan::testing::error_of;

/// Every rank has its own dealer, as every process does.
TEST(SampleDealer, DealsEverySampleOncePerEpochHoweverTheRanksChange) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    ElasticOptions options;
    options.samples = 1 + static_cast<std::int64_t>(random() % 60);
    options.batch = 1 + static_cast<std::int64_t>(random() % 20);
    options.batch_per_rank = random() % 2 == 0;
    options.seed = random();
    SCOPED_TRACE("seed " + std::to_string(seed));
    SampleDealer first(options), second(options);
    ElasticPosition at;
    std::vector<std::int64_t> used;
    std::vector<std::vector<std::int64_t>> epochs;
    while (at.epoch < 3) {
      const int size = 1 + static_cast<int>(random() % 6);
      double weights = 0;
      std::size_t largest = 0, smallest = SIZE_MAX;
      for (int rank = 0; rank < size; ++rank) {
        const ElasticStep step = (rank % 2 == 0 ? first : second).deal(at, rank, size);
        EXPECT_EQ(step.number, at.step);
        ASSERT_FALSE(step.samples.empty());
        const std::size_t share = step.weight == 0 ? 0 : step.samples.size();
        used.insert(used.end(), step.samples.begin(),
                    step.samples.begin() + static_cast<std::ptrdiff_t>(share));
        weights += step.weight * static_cast<double>(share) / size;
        largest = std::max(largest, share);
        smallest = std::min(smallest, share);
      }
      EXPECT_NEAR(weights, 1, 1e-12) << "the average over ranks is the mean over the batch";
      EXPECT_LE(largest, smallest + 1);
      const ElasticPosition next = first.after(at, size);
      EXPECT_EQ(next.step, at.step + 1);
      if (next.epoch != at.epoch) epochs.push_back(std::exchange(used, {}));
      at = next;
    }
    for (std::vector<std::int64_t>& epoch : epochs) {
      std::sort(epoch.begin(), epoch.end());
      ASSERT_EQ(static_cast<std::int64_t>(epoch.size()), options.samples);
      for (std::int64_t i = 0; i < options.samples; ++i) ASSERT_EQ(epoch[static_cast<std::size_t>(i)], i);
    }
  }
}

TEST(SampleDealer, OrdersEachEpochDifferentlyAndGivesEachStepItsSeed) {
  ElasticOptions options;
  options.samples = options.batch = 100;
  SampleDealer dealer(options);
  const ElasticStep first = dealer.deal({}, 0, 2), other_rank = dealer.deal({}, 1, 2);
  const ElasticStep second = dealer.deal({.step = 1, .epoch = 1, .next = 0}, 0, 2);
  EXPECT_NE(first.samples, second.samples);
  EXPECT_NE(first.seed, other_rank.seed);
  EXPECT_NE(first.seed, second.seed);
  EXPECT_EQ(first.samples, dealer.deal({}, 0, 2).samples);
  options.seed = 1;
  EXPECT_NE(first.samples, SampleDealer(options).deal({}, 0, 2).samples);
}

TEST(ElasticStep, SplitsItsSamplesIntoMicroBatches) {
  const ElasticStep step{.samples = {5, 3, 8, 1, 9}};
  EXPECT_EQ(step.micro_batches(2), (std::vector<std::vector<std::int64_t>>{{5, 3}, {8, 1}, {9}}));
  EXPECT_EQ(step.micro_batches(9).size(), 1u);
  EXPECT_EQ(error_of([&] { step.micro_batches(0); }).kind(), ErrorKind::kInvalid);
}

TEST(ElasticOptions, NameTheWrongField) {
  const auto message = [](const auto& change) {
    ElasticOptions options;
    options.samples = options.batch = 10;
    options.validate();
    change(options);
    return error_of([&] { options.validate(); }).message();
  };
  EXPECT_NE(message([](auto& options) { options.samples = 0; }).find("samples is 0"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.batch = -1; }).find("batch is -1"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.min_ranks = 0; }).find("min_ranks"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.start.next = 10; }).find("start.next"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.group.ranks = {0}; }).find("group.ranks"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.step_timeout = {}; }).find("step_timeout"),
            std::string::npos);
}

}  // namespace
}  // namespace torchspan::elastic::sample_dealer_test
