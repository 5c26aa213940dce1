#include "elastic/recovery/state_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "elastic/recovery/copy_memory.h"
#include "tests/support/errors.h"

namespace torchspan::elastic::state_part_test {
namespace {

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

}  // namespace
}  // namespace torchspan::elastic::state_part_test
