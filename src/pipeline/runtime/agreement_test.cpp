#include "pipeline/runtime/agreement.h"

#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::agreement_test {
namespace {

using ::testing::HasSubstr;

TEST(Agreement, GathersTextsOfAnyLength) {
  for (const std::size_t longest : {std::size_t{3}, kMostBytes - 1, kMostBytes, 2 * kMostBytes + 5}) {
    const std::vector<std::string> expected = {std::string(longest, 'a'), "", std::string(longest / 2, 'c')};
    on_workers(3, 1, [&](Worker& worker) {
      const auto rank = static_cast<std::size_t>(worker.rank());
      const std::vector<std::string> names = {"worker0", "worker1", "worker2"};
      for (int round = 0; round < 2; ++round)
        EXPECT_TRUE(all_gather_text(worker, expected[rank], names, std::chrono::seconds(9)) == expected);
    });
  }
}

/// The first and the last of its 2100 parameters have another value than the others.
struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(double value) {
    for (int i = 0; i < 2100; ++i) {
      const double mine = i == 0 || i == 2099 ? value : 1;
      last = register_parameter(std::to_string(i), at::full({1}, mine, at::kDouble));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x * last; }
  at::Tensor last;
};
TORCH_MODULE(Many);

TEST(Agreement, ComparesReplicasWithThousandsOfTensors) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Many>(1.0 + worker.rank());
    Pipeline pipe(worker, layers, {.balance = {1}, .replicas = 2});
    for (const at::Tensor& parameter : pipe.parameters()) EXPECT_EQ(parameter.item<double>(), 1);
  });
}

TEST(Agreement, ComparesPipelinesWithLongDescriptions) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u).named(std::string(kMostBytes, 'x'));
    layers.add<Dense>(2u);
    PipelineOptions options;
    const Pipeline same(worker, layers, options);
    options.micro_batches = worker.rank() + 1;
    texts[static_cast<std::size_t>(worker.rank())] =
        error_text([&] { const Pipeline different(worker, layers, options); });
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, HasSubstr("worker 'worker0' has \"micro_batches 1\", worker 'worker1' has "
                                "\"micro_batches 2\""));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::agreement_test
