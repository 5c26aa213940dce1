#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/messages/messages.h"
#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::initial_values_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::request_type;

/// A large parameter, a buffer and a number, with values of its worker.
struct LargeImpl : torch::nn::Module {
  LargeImpl(std::int64_t elements, double value) {
    weight = register_parameter("weight", at::full({elements}, value, at::kDouble));
    scale = register_parameter("scale", at::full({}, value, at::kDouble));
    steps = register_buffer("steps", at::full({2}, static_cast<std::int64_t>(value), at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight[0] * scale; }
  at::Tensor weight, scale, steps;
};
TORCH_MODULE(Large);

/// Layers whose values depend on the worker that builds them.
Layers large_layers(Worker& worker, int count, std::int64_t elements) {
  Layers layers;
  for (int layer = 0; layer < count; ++layer) layers.add<Large>(elements, 10.0 * worker.rank() + layer);
  return layers;
}

void expect_values(const torch::nn::Module& module, double expected) {
  for (const at::Tensor& value : module.parameters()) EXPECT_TRUE(at::all(value == expected).item<bool>());
  for (const at::Tensor& value : module.buffers()) EXPECT_TRUE(at::all(value == expected).item<bool>());
}

TEST(InitialValues, OfAReplicaTravelInOneMessage) {
  constexpr std::int64_t kElements = 1 << 20;  // 8 MiB: 128 rounds of Worker::all_gather_bytes()
  on_workers(2, 1, [](Worker& worker) {
    const Layers layers = large_layers(worker, 2, kElements);
    const auto before = worker.debug().calls_sent;
    const TimePoint begin = worker.runtime().executor.now();
    Pipeline pipe(worker, layers, {.balance = {2}, .replicas = 2});
    EXPECT_EQ(worker.debug().calls_sent - before, worker.rank() == 1 ? 1u : 0u);
    EXPECT_LT(worker.runtime().executor.now() - begin, std::chrono::milliseconds(10));
    for (int layer = 0; layer < 2; ++layer) expect_values(*pipe.module(layer), layer);
  });
}

TEST(InitialValues, OfTiesTravelInOneMessageToEachWorker) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    std::vector<TiedParameter> all;
    for (int layer = 0; layer < 3; ++layer)
      all.emplace_back(layers.add<Large>(1 << 17, 10.0 * worker.rank() + layer), "weight");
    layers.tie(all);
    const auto before = worker.debug().calls_sent;
    Pipeline pipe(worker, layers, {.balance = {1, 1, 1}});
    EXPECT_EQ(worker.debug().calls_sent - before, worker.rank() > 0 ? 1u : 0u);
    const auto parameters = pipe.module(static_cast<int>(worker.rank()))->named_parameters();
    EXPECT_TRUE(at::all(parameters["weight"] == 0).item<bool>());
    EXPECT_EQ(parameters["scale"].item<double>(), 11.0 * worker.rank()) << "not tied";
  });
}

/// Worker 0 has the store only. Worker 1, which has the first copy, answers worker 3, and dies before it answers worker 2.
TEST(InitialValues, ThatDoNotArriveOnOneWorkerFailOnAll) {
  auto options = torchspan::testing::pipeline_cluster(4);
  options.graceful = false;
  torchspan::testing::SimCluster world(options);
  std::vector<std::string> texts(4);
  world.network().delay_if(
      [](const net::SimMessage& message) {
        return message.from == "sim:worker2" && request_type(message) == AskInitialValues::kType;
      },
      std::chrono::seconds(1));
  world.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    worker.runtime().log.set_level(LogLevel::kOff);
    Executor& executor = worker.runtime().executor;
    if (worker.rank() == 0) return executor.sleep(std::chrono::seconds(30));
    Thread killer;
    if (worker.rank() == 1) {
      killer = executor.spawn("killer", [&] {
        executor.sleep(std::chrono::milliseconds(500));
        world.kill(1);
      });
    }
    Layers layers;
    std::vector<TiedParameter> all;
    for (int layer = 0; layer < 3; ++layer) all.emplace_back(layers.add<Large>(64, layer), "weight");
    layers.tie(all);
    texts[worker.rank()] = error_text([&] {
      Pipeline pipe(worker, layers, {.balance = {1, 1, 1}, .workers = {"worker1", "worker2", "worker3"}});
    });
    EXPECT_LT(executor.now().time_since_epoch(), std::chrono::seconds(20)) << "waited for its timeout";
  });
  for (const int survivor : {2, 3})
    EXPECT_THAT(texts[static_cast<std::size_t>(survivor)], HasSubstr("worker1"));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::initial_values_test
