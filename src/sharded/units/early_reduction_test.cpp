// When gradients are reduced and gathers end, as seen from inside a step.
#include <array>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>

#include <torchspan/sharded.h>

#include "sharded/units/test_models.h"
#include "tests/support/ranks.h"

namespace torchspan::sharded::early_reduction_test {
namespace {

using testing::Dense;
using ::testing::ElementsAre;
using testing::kWidth;
using testing::LayerSpec;
using testing::RandomNet;
using testing::values;
using torchspan::testing::on_ranks;
using torchspan::testing::Rank;

/// A unit with a parameter on each side of three inner units, which sees when the memory of a gradient is freed.
struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    before = register_parameter("before", values({kWidth, kWidth}, 1));
    for (int i = 0; i < 3; ++i)
      inner.push_back(register_module("inner" + std::to_string(i), Sharded<Dense>(10 * i)));
    after = register_parameter("after", values({kWidth, kWidth}, 2));
  }
  at::Tensor forward(at::Tensor x, bool with_after) {
    x = at::matmul(x, before);
    for (std::size_t i = 0; i < inner.size(); ++i) {
      x = inner[i]->forward(x);
      // Since LibTorch 2.0, a hook of the unit's output itself runs before the unit's own; in 1.13, after it.
      x = x.view_as(x);
      x.register_hook([this, i](const at::Tensor&) { freed[i] = gradient && gradient->expired(); });
    }
    if (!with_after) return x;
    const at::Tensor flat = after.view({kWidth * kWidth});
    flat.register_hook([this](const at::Tensor& known) { gradient = known.storage().getWeakStorageImpl(); });
    return at::matmul(x, flat.view({kWidth, kWidth}));
  }
  at::Tensor before, after;
  std::vector<Sharded<Dense>> inner;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> gradient;  ///< of `after`
  std::array<bool, 3> freed{};  ///< whether it was before the backward of an inner unit
};
TORCH_MODULE(Outer);

// The ranks ask each other when the last inner unit begins its backward, and know when the one before it begins.
TEST(EarlyReduction, AUnitWithOthersInsideReducesWhatIsCompleteOnAllRanks) {
  on_ranks(2, [&](const Rank& self) {
    for (const bool on_all : {true, false}) {
      Sharded<Outer> net;
      FullyShardedDataParallel<Sharded<Outer>> model(net, self.group, {.alone_bytes = 1, .overlap_bytes = 0});
      const bool with_after = on_all || self.rank == 0;
      model(values({3, kWidth}, self.rank), with_after).pow(2).sum().backward();
      EXPECT_THAT(net->freed, ElementsAre(on_all, false, false));
      EXPECT_TRUE(net->after.grad().defined());
      EXPECT_TRUE(!net->gradient || net->gradient->expired());
    }
  });
}

TEST(EarlyReduction, AGatherThatNoUnitNeedsEndsWithTheForward) {
  on_ranks(2, [&](const Rank& self) {
    const at::NoGradGuard no_grad;
    LayerSpec dense;
    dense.unit = true;
    RandomNet net(std::vector<LayerSpec>{dense, dense, dense});
    RandomNet whole(net->specs);
    FullyShardedDataParallel<RandomNet> model(net, self.group);
    const at::Tensor x = values({3, kWidth}, self.rank);
    model(x, std::vector<std::size_t>{});
    model(x, std::vector<std::size_t>{1, 2});  // as before up to layer 0, so layer 1 is prefetched
    for (const at::Tensor& part : net->parameters()) part.add_(1);
    model.with_full_parameters([&] {
      const auto before = whole->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(at::equal(item.value(), before[item.key()] + 1)) << item.key();
    });
  });
}

}  // namespace
}  // namespace torchspan::sharded::early_reduction_test
