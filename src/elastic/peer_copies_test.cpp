#include "elastic/peer_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <random>
#include <set>

#include <ATen/core/ivalue.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <torchspan/core/error.h>

#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::elastic::peer_copies_test {
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

using torchspan::testing::error_of;

/// A program's objects, of all dtypes and shapes.
struct Objects {
  explicit Objects(std::uint64_t seed) : net((torch::manual_seed(seed), torch::nn::Linear(3, 5))) {
    flags = at::rand({7}) > 0.5;
    half = at::rand({3, 3}).to(at::kHalf);
    turned = at::rand({4, 6}, at::kDouble).t();
    count = static_cast<std::int64_t>(seed);
    label = "seed " + std::to_string(seed);
  }
  NamedSources sources() {
    NamedSources all;
    all.emplace_back("net", checkpoint::source_of(net));
    all.emplace_back("flags", checkpoint::source_of(flags));
    all.emplace_back("half", checkpoint::source_of(half));
    all.emplace_back("turned", checkpoint::source_of(turned));
    all.emplace_back("empty", checkpoint::source_of(empty));
    all.emplace_back("scalar", checkpoint::source_of(scalar));
    all.emplace_back("count", checkpoint::source_of(count));
    all.emplace_back("label", checkpoint::source_of(label));
    return all;
  }
  torch::nn::Linear net;
  at::Tensor flags, half, turned, empty = at::empty({0, 3}), scalar = at::full({}, 2.5, at::kDouble);
  std::int64_t count = 0;
  std::string label;
};

void expect_same(const Objects& a, const Objects& b) {
  EXPECT_TRUE(a.net->weight.equal(b.net->weight));
  EXPECT_TRUE(a.net->bias.equal(b.net->bias));
  EXPECT_TRUE(a.flags.equal(b.flags));
  EXPECT_TRUE(a.half.equal(b.half));
  EXPECT_TRUE(a.turned.equal(b.turned));
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.label, b.label);
}

/// A part of the tensor "table".
class Shard final : public checkpoint::StateSource {
 public:
  void save(checkpoint::StateWriter& writer) const override {
    writer.add_shard("", at::zeros({2, 2}), {4, 2}, {2, 0});
  }
  void load(const checkpoint::StateReader&) override {}
};

TEST(StatePart, RestoresWhatItCopiedThoughTheObjectsChangedSince) {
  Objects first(1), expected(1), other(2);
  StatePart part;
  part.take({7, 1}, first.sources());
  {
    const at::NoGradGuard no_grad;
    first.net->weight.zero_();
    first.turned.zero_();
  }
  first.label = "changed";
  part.load(other.sources());
  expect_same(other, expected);
  part.load(first.sources());
  expect_same(first, expected);
}

TEST(StatePart, CanBeSentInTwoTensorsAndTakenAgainInTheSameMemory) {
  Objects first(1), other(2);
  StatePart part, arrived;
  part.take({1, 1}, first.sources());
  const void* memory = part.data.data_ptr();
  part.forget();
  EXPECT_FALSE(part.exists());
  part.take({2, 1}, first.sources());
  EXPECT_EQ(part.data.data_ptr(), memory);
  arrived.expect(part.id, part.header.numel(), part.data.numel());
  arrived.header.copy_(part.header);
  arrived.data.copy_(part.data);
  part.data.zero_();
  arrived.load(other.sources());
  expect_same(other, Objects(1));
  arrived.data.zero_();
  expect_same(other, Objects(1));
}

TEST(StatePart, RejectsShardsDamageAndObjectsThatDoNotFit) {
  Objects first(1);
  StatePart part;
  NamedSources shard;
  shard.emplace_back("table", std::make_unique<Shard>());
  const Error refused = error_of([&] { part.take({1, 1}, shard); });
  EXPECT_EQ(refused.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(refused.what(), ::testing::HasSubstr("'table' is a part of a tensor"));
  EXPECT_FALSE(part.exists());
  part.take({1, 1}, first.sources());
  torch::nn::Linear wrong(3, 6);
  NamedSources misfit;
  misfit.emplace_back("net", checkpoint::source_of(wrong));
  EXPECT_THAT(error_of([&] { part.load(misfit); }).what(), ::testing::HasSubstr("net.weight"));
  part.data = part.data.narrow(0, 0, 64).clone();
  EXPECT_EQ(error_of([&] { part.load(first.sources()); }).kind(), ErrorKind::kInvalid);
  part.header = part.header.narrow(0, 0, part.header.numel() - 1).clone();
  EXPECT_EQ(error_of([&] { part.load(first.sources()); }).kind(), ErrorKind::kInvalid);
}

TEST(CopyMemory, HasTheOlderCopiesUntilAllRanksHaveTheNextOnes) {
  Objects objects(1);
  const CopyId old{5, 1}, now{10, 1};
  CopyMemory memory;
  memory.next_own.take(old, objects.sources());
  memory.next_held.take(old, objects.sources());
  memory.commit();
  memory.next_own.take(now, objects.sources());
  EXPECT_EQ(memory.inventory().own, (std::vector<CopyId>{old, now}));
  EXPECT_EQ(memory.inventory().held, std::vector<CopyId>{old});
  CopyMemory restored = memory;
  restored.keep(old);
  EXPECT_EQ(restored.inventory().own, std::vector<CopyId>{old});
  EXPECT_NE(restored.held(old), nullptr);
  memory.next_held.take(now, objects.sources());
  CopyMemory kept = memory;
  kept.keep(now);
  EXPECT_EQ(kept.inventory().own, std::vector<CopyId>{now});
  EXPECT_EQ(kept.inventory().held, std::vector<CopyId>{now});
  memory.commit();
  EXPECT_EQ(memory.inventory().own, std::vector<CopyId>{now});
  EXPECT_EQ(memory.own(old), nullptr);
  EXPECT_EQ(memory.held(now)->id, now);
}

// An attempt to train ends by an exception while a copy is being sent.
TEST(PeerCopies, WhoseOwnerEndsStopSendingAndTellTheOtherRanks) {
  testing::on_ranks(3, [](const testing::Rank& self) {
    CopyMemory memory;
    std::optional<PeerCopies> copies(std::in_place, self.group, memory, self.runtime.executor);
    torch::nn::Linear net(2, 2);
    copies->add("net", checkpoint::source_of(net));
    copies->exchange(-1, 1);
    if (self.rank != 2) copies->begin(1);  // waits for rank 2
    if (self.rank == 0) return copies.reset();
    const Error failure = error_of([&] {
      if (self.rank == 2) copies->begin(1);
      copies->finish();
    });
    EXPECT_THAT(failure.what(), ::testing::HasSubstr("rank 0 stopped copying its state"));
  });
}

}  // namespace
}  // namespace torchspan::elastic::peer_copies_test
