#include "data/api/sampler.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

#include "tests/support/errors.h"

namespace torchspan::data::sampler_test {
namespace {

using torchspan::testing::error_of;

/// Every rank has its own sampler, as every process does.
TEST(Sampler, GivesEverySampleOncePerEpochHoweverTheRanksChange) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    SamplerOptions options;
    options.samples = 1 + static_cast<std::int64_t>(random() % 60);
    options.batch = 1 + static_cast<std::int64_t>(random() % 20);
    options.batch_per_rank = random() % 2 == 0;
    options.seed = random();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Sampler first(options), second(options);
    DataPosition at;
    std::vector<std::int64_t> used;
    std::vector<std::vector<std::int64_t>> epochs;
    while (at.epoch < 3) {
      const int size = 1 + static_cast<int>(random() % 6);
      double weights = 0;
      std::size_t largest = 0, smallest = SIZE_MAX;
      for (int rank = 0; rank < size; ++rank) {
        const DataStep step = (rank % 2 == 0 ? first : second).step(at, rank, size);
        EXPECT_EQ(step.number, at.step);
        EXPECT_EQ(step.batch,
                  std::min(options.samples - at.next, options.batch * (options.batch_per_rank ? size : 1)));
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
      const DataPosition next = first.after(at, size);
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

TEST(Sampler, OrdersEachEpochDifferentlyAndGivesEachStepItsSeed) {
  SamplerOptions options;
  options.samples = options.batch = 100;
  Sampler sampler(options);
  const DataStep first = sampler.step({}, 0, 2), other_rank = sampler.step({}, 1, 2);
  const DataStep second = sampler.step({.step = 1, .epoch = 1, .next = 0}, 0, 2);
  EXPECT_NE(first.samples, second.samples);
  EXPECT_NE(first.seed, other_rank.seed);
  EXPECT_NE(first.seed, second.seed);
  EXPECT_EQ(first.samples, sampler.step({}, 0, 2).samples);
  options.seed = 1;
  EXPECT_NE(first.samples, Sampler(options).step({}, 0, 2).samples);
}

TEST(DataStep, SplitsItsSamplesIntoMicroBatches) {
  const DataStep step{.samples = {5, 3, 8, 1, 9}};
  EXPECT_EQ(step.micro_batches(2), (std::vector<std::vector<std::int64_t>>{{5, 3}, {8, 1}, {9}}));
  EXPECT_EQ(step.micro_batches(9).size(), 1u);
  EXPECT_EQ(error_of([&] { step.micro_batches(0); }).kind(), ErrorKind::kInvalid);
}

TEST(Sampler, KeepsTheOrderOfTheDataSetAndLeavesOutASmallLastStepWhenAsked) {
  Sampler sampler({.samples = 10, .batch = 4, .shuffle = false, .drop_last = true});
  DataPosition at;
  std::vector<std::vector<std::int64_t>> used;
  while (at.epoch < 2) {
    used.push_back(sampler.step(at, 1, 2).samples);
    at = sampler.after(at, 2);
  }
  EXPECT_EQ(used, (std::vector<std::vector<std::int64_t>>{{2, 3}, {6, 7}, {2, 3}, {6, 7}}));
  EXPECT_EQ(at, (DataPosition{.step = 4, .epoch = 2, .next = 0}));
  EXPECT_EQ(sampler.of_step({.step = 3, .epoch = 1, .next = 7}, 2),
            (DataPosition{.step = 3, .epoch = 2, .next = 0}))
      << "as a checkpoint of steps of another size may say";
}

}  // namespace
}  // namespace torchspan::data::sampler_test
