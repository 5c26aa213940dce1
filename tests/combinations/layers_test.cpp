// Wrappers in layers of pipelines.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>

#include <torch/nn.h>

#include <torchspan/data_parallel.h>
#include <torchspan/pipeline.h>
#include <torchspan/sharded.h>

#include "tests/combinations/training_case.h"
#include "tests/combinations/training_model.h"
#include "tests/support/in_process_group.h"
#include "tests/support/pipeline_world.h"

namespace torchspan::combinations::layers_test {
namespace {

using pipeline::Layers;
using pipeline::Pipeline;
using testing::InProcessWorld;
using testing::SimCluster;

/// Where one rank throws, in the second micro-batch.
enum class Place : std::uint8_t { kNowhere, kInForward, kBehindForward, kInBackward };

struct InnerImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (throws) throw std::runtime_error(kThrown);
    return layer(x);
  }
  nn::Linear layer = register_module("layer", filled(3, 3, 5));
  bool throws = false;
};
TORCH_MODULE(Inner);

/// Averages its gradients with the same layer of another pipeline.
template <template <class> class Wrapper>
struct AveragedImpl : nn::Module {
  AveragedImpl(const collective::Group& group, Place place) : place(place), wrapper(inner, group) {}
  at::Tensor forward(const at::Tensor& x) {
    const bool second = ++calls % 2 == 0;
    inner->throws = second && place == Place::kInForward;
    at::Tensor output = wrapper(x);
    if (second && place == Place::kBehindForward) throw std::runtime_error(kThrown);
    if (second && place == Place::kInBackward) {
      output = output * 1;
      output.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error(kThrown); });
    }
    return output;
  }
  Inner inner = register_module("inner", Inner());
  Place place;
  int calls = 0;
  Wrapper<Inner> wrapper;
};
template <template <class> class Wrapper>
using Averaged = nn::ModuleHolder<AveragedImpl<Wrapper>>;

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// Two pipelines of one worker each. In the second one, the layer throws. Returns what each worker caught.
template <template <class> class Wrapper>
std::vector<std::string> caught(Place place) {
  std::vector<std::string> texts(2);
  SimCluster cluster(testing::pipeline_cluster(2, 1));
  std::unique_ptr<InProcessWorld> groups;
  cluster.run([&](Worker& worker) {
    worker.runtime().log.set_level(LogLevel::kOff);
    if (worker.rank() == 0)
      groups = std::make_unique<InProcessWorld>(
          cluster.executor(), 2, testing::InProcessOptions{.timeout = std::chrono::seconds(30)});
    worker.barrier();
    const auto me = static_cast<std::size_t>(worker.rank());
    try {
      Layers layers;
      layers.add<Averaged<Wrapper>>(groups->group(worker.rank(), worker.runtime()),
                                    me == 1 ? place : Place::kNowhere);
      Pipeline pipe(worker, layers,
                    {.balance = {1},
                     .workers = {fmt::format("worker{}", me)},
                     .micro_batches = 2,
                     .name = fmt::format("pipeline {}", me)});
      pipe.train_step(numbers({4, 3}, 1.0 + static_cast<double>(me)), numbers({4, 3}, 9), mean_square);
      const auto module = std::dynamic_pointer_cast<AveragedImpl<Wrapper>>(pipe.module(0));
      nn::Linear alone = filled(3, 3, 5);
      for (const double seed : {1.0, 2.0})
        (mean_square(alone(numbers({4, 3}, seed)), numbers({4, 3}, 9)) / 2).backward();
      if (module->inner->layer->weight.grad().sizes() == alone->weight.sizes())  // not a part
        EXPECT_TRUE(at::allclose(module->inner->layer->weight.grad(), alone->weight.grad(), 1e-9, 1e-11));
    } catch (const std::exception& error) {
      texts[me] = error.what();
    }
    worker.barrier();
    if (me == 0) groups.reset();
  });
  return texts;
}

TEST(LayersOfPipelines, MayAverageGradientsWithAnotherPipeline) {
  for (const std::string& text : caught<DistributedDataParallel>(Place::kNowhere)) EXPECT_EQ(text, "");
}

// The operations of the rank that threw and of the others belong to different micro-batches. The others once got an error
// about different calls, without the cause, or waited for the timeout.
TEST(LayersOfPipelines, ThatThrowOnOneRankNameItsExceptionOnTheOthers) {
  for (const Place place : {Place::kInForward, Place::kBehindForward, Place::kInBackward}) {
    SCOPED_TRACE(static_cast<int>(place));
    const std::vector<std::string> texts = caught<DistributedDataParallel>(place);
    EXPECT_NE(texts[1].find(kThrown), std::string::npos) << texts[1];
    EXPECT_NE(texts[0].find("rank 1 gave up its backward pass"), std::string::npos) << texts[0];
    EXPECT_NE(texts[0].find("make the pipeline and its layers again"), std::string::npos) << texts[0];
  }
}

TEST(LayersOfPipelines, OfShardedParametersThatThrowOnOneRankFailOnTheOthers) {
  for (const Place place : {Place::kInForward, Place::kBehindForward, Place::kInBackward}) {
    SCOPED_TRACE(static_cast<int>(place));
    const std::vector<std::string> texts = caught<FullyShardedDataParallel>(place);
    EXPECT_NE(texts[1].find(kThrown), std::string::npos) << texts[1];
    EXPECT_NE(texts[0].find("rank 1"), std::string::npos) << texts[0];
    EXPECT_EQ(texts[0].find("timed out"), std::string::npos) << texts[0];
  }
}

}  // namespace
}  // namespace torchspan::combinations::layers_test
