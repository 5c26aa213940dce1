#include "elastic/recovery/copy_inventory.h"

#include <gtest/gtest.h>
#include <random>
#include <set>

#include <torchspan/core/error.h>

#include "tests/support/environment.h"

namespace torchspan::elastic::copy_inventory_test {
namespace {

/// Ranks that copy, commit and die at random. The oracle knows of each copy which processes have which part.
class RandomWorld {
 public:
  RandomWorld(std::size_t ranks, std::mt19937_64& random)
      : ranks_(ranks), inventories_(ranks), random_(random) {}

  /// A copy of which a random part of the transfers arrives.
  void copy(const CopyId& id) {
    std::vector<bool> own(ranks_), held(ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      own[rank] = random_() % 8 != 0;
      held[(rank + 1) % ranks_] = own[rank] && random_() % 4 != 0;
    }
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (own[rank]) inventories_[rank].own.push_back(id);
      if (held[rank]) inventories_[rank].held.push_back(id);
    }
    all_.insert(id);
  }
  void kill(std::size_t rank) { inventories_[rank] = CopyInventory(); }

  std::optional<CopyId> oracle() const {
    for (auto id = all_.rbegin(); id != all_.rend(); ++id) {
      std::set<std::size_t> parts;  // whose state exists
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        for (const CopyId& one : inventories_[rank].own)
          if (one == *id) parts.insert(rank);
        for (const CopyId& one : inventories_[rank].held)
          if (one == *id) parts.insert((rank + ranks_ - 1) % ranks_);
      }
      if (parts.size() == ranks_) return *id;
    }
    return std::nullopt;
  }
  const std::vector<CopyInventory>& inventories() const { return inventories_; }

 private:
  const std::size_t ranks_;
  std::vector<CopyInventory> inventories_;
  std::set<CopyId> all_;
  std::mt19937_64& random_;
};

TEST(CopyInventory, ChoosesTheNewestCopyOfWhichEveryPartExists) {
  const auto seed = testing::number_from("TORCHSPAN_SEED", std::uint64_t{1});
  SCOPED_TRACE("TORCHSPAN_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int found = 0, none = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::size_t ranks = 1 + random() % 5;
    RandomWorld world(ranks, random);
    for (std::int64_t step = 0; step < 3; ++step)
      world.copy(
          {static_cast<std::int64_t>(random() % 3), random() % 2 + static_cast<std::uint64_t>(step) * 10});
    for (std::size_t deaths = random() % 3; deaths > 0; --deaths) world.kill(random() % ranks);
    const auto expected = world.oracle();
    (expected ? found : none)++;
    ASSERT_EQ(newest_complete(world.inventories()), expected);
  }
  EXPECT_GT(found, 500);
  EXPECT_GT(none, 500);
}

TEST(CopyInventory, SurvivesTheDeathOfEveryRankAloneButNotOfANeighborWithIt) {
  const CopyId old{5, 1}, now{10, 1};
  const std::vector<CopyInventory> full(
      4, {.own = {old, now}, .held = {old, now}, .newest_checkpoint = -1, .round = 0});
  for (std::size_t dead = 0; dead < 4; ++dead) {
    auto ranks = full;
    ranks[dead] = CopyInventory();
    EXPECT_EQ(newest_complete(ranks), now);
    ranks[(dead + 2) % 4] = CopyInventory();
    EXPECT_EQ(newest_complete(ranks), now);
    ranks[(dead + 1) % 4] = CopyInventory();
    EXPECT_EQ(newest_complete(ranks), std::nullopt);
  }
  EXPECT_EQ(newest_complete({}), std::nullopt);
}

TEST(CopyInventory, IsReadAsItWasWrittenAndRejectsEveryTruncation) {
  const CopyInventory mine{.own = {{5, 1}, {10, 1}}, .held = {{5, 1}}, .newest_checkpoint = 7, .round = 3};
  const Bytes bytes = mine.encode();
  const CopyInventory read = CopyInventory::decode(bytes);
  EXPECT_EQ(read.own, mine.own);
  EXPECT_EQ(read.held, mine.held);
  EXPECT_EQ(read.newest_checkpoint, 7);
  EXPECT_EQ(read.round, 3u);
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(CopyInventory::decode(BytesView(bytes).first(size)), Error) << size;
}

}  // namespace
}  // namespace torchspan::elastic::copy_inventory_test
