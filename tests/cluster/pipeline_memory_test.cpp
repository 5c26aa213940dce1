// The memory that the workers of a pipeline hold at their peak, in real processes, against the simulation of the same
// schedule with measured costs.
#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <torch/torch.h>

#include <torchspan/pipeline.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/memory.h"

namespace torchspan::pipeline_memory_test {
namespace {

using pipeline::ActivationCheckpoint;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using testing::expect_all_end_well;
using testing::heap_in_use;
using testing::ProcessWorld;
using testing::require;

constexpr std::int64_t kWidth = 192;
constexpr std::int64_t kRows = 48;  ///< of a micro-batch
constexpr int kMicroBatches = 6;

/// A block of a transformer without attention.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// The most memory that this process held when an action began: its heap, and the inputs of stages that are elsewhere,
/// in blocks that another worker's process lends.
class MemoryPeak {
 public:
  void restart() {
    most_ = 0;
    before_ = held();
  }
  void sample() { most_ = std::max(most_, held()); }
  std::int64_t bytes() const { return most_ - before_; }

  void add_input(const at::Tensor& x) {
    const c10::DataPtr& memory = x.storage().data_ptr();
    if (memory.get_deleter() == c10::GetAllocator(c10::kCPU)->raw_deleter()) return;
    std::erase_if(lent_, [&](const auto& each) {
      return each.use_count() == 0 || each._unsafe_get_target() == x.storage().unsafeGetStorageImpl();
    });
    lent_.push_back(x.storage().getWeakStorageImpl());
  }

 private:
  std::int64_t held() const {
    std::int64_t bytes = heap_in_use();
    for (const auto& each : lent_) {
      if (const auto storage = each.lock()) bytes += static_cast<std::int64_t>(storage->nbytes());
    }
    return bytes;
  }

  std::int64_t most_ = 0, before_ = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> lent_;
};

/// Passes its input on, and samples the memory when its backward begins.
struct SampledBackward : torch::autograd::Function<SampledBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t peak) {
    context->saved_data["peak"] = peak;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<MemoryPeak*>(context->saved_data["peak"].toInt())->sample();
    return {gradients[0], at::Tensor()};
  }
};

/// Stages of `blocks` blocks that sample the memory at the begin of their forwards and backwards.
Layers sampled_model(int stages, int blocks, MemoryPeak& peak) {
  Layers layers;
  for (int stage = 0; stage < stages; ++stage) {
    layers.add_function("begin", [&peak](const at::Tensor& x) {
      peak.add_input(x);
      peak.sample();
      return x;
    });
    for (int block = 0; block < blocks; ++block) layers.add<Block>();
    layers.add_function("end", [&peak](const at::Tensor& x) {
      return SampledBackward::apply(x, reinterpret_cast<std::int64_t>(&peak));
    });
  }
  return layers;
}

at::Tensor squared_distance(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// Compares what this worker holds at the peak of a step with the simulation.
void compare_peak(Session& session, PipelineOptions options, int stages) {
  const int blocks = 8 / stages;
  options.balance.assign(static_cast<std::size_t>(stages), blocks + 2);
  options.micro_batches = kMicroBatches;
  MemoryPeak peak;
  const Layers layers = sampled_model(stages, blocks, peak);
  const at::Tensor x = at::randn({kRows * kMicroBatches, kWidth}), y = at::randn_like(x);
  const auto costs = pipeline::measure_costs(
      session.worker(), layers, options,
      {x.narrow(0, 0, kRows), y.narrow(0, 0, kRows), pipeline::loss_of(squared_distance), 1});
  Pipeline pipe(session.worker(), layers, options);
  for (int step = 0; step < 2; ++step) pipe.train_step(x, y, squared_distance);
  session.worker().barrier();
  peak.restart();
  session.worker().barrier();  // no activation arrives earlier
  pipe.train_step(x, y, squared_distance);
  const auto held = static_cast<double>(peak.bytes());
  const auto rank = static_cast<std::size_t>(session.rank());
  const double predicted = schedule::simulate(pipe.last_step().table, costs).peak_live.at(rank);
  const std::string text =
      fmt::format("schedule {}, checkpoint {}, rank {}: predicted {:.0f} KiB, held {:.0f} KiB ({:+.1f} %)",
                  static_cast<int>(options.schedule), static_cast<int>(options.checkpoint), rank,
                  predicted / 1024, held / 1024, 100 * (predicted / held - 1));
  std::printf("%s\n", text.c_str());
  require(held > 1 << 20, text);
  require(std::abs(predicted / held - 1) < 0.1, text);
}

void compare_peaks() {
  Session session(WorkerOptions::from_env());
  const auto with = [](Schedule schedule, ActivationCheckpoint checkpoint) {
    PipelineOptions options;
    options.schedule = schedule;
    options.checkpoint = checkpoint;
    return options;
  };
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1})
    compare_peak(session, with(schedule, ActivationCheckpoint::kNever), 2);
  for (const Schedule schedule : {Schedule::kInterleaved, Schedule::kZBV})
    compare_peak(session, with(schedule, ActivationCheckpoint::kNever), 4);
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1})
    compare_peak(session, with(schedule, ActivationCheckpoint::kAlways), 2);
  PipelineOptions some = with(Schedule::k1F1B, ActivationCheckpoint::kAlways);
  some.checkpoint_layers = {1, 2, 7, 8};  // half of the blocks
  compare_peak(session, some, 2);
  session.shutdown();
}

TEST(PipelineMemoryOfProcesses, IsThePeakOfTheSimulationWithMeasuredCosts) {
  if (testing::kFreedMemoryIsKept || heap_in_use() == 0) GTEST_SKIP() << "the allocator does not count";
  ProcessWorld world(2);
  world.start_all("pipeline_memory.compare_peaks");
  expect_all_end_well(world, std::chrono::seconds(120));
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    std::printf("%s", world.process(rank).output().c_str());
}

const testing::Scenarios kScenarios("pipeline_memory", {{"compare_peaks", compare_peaks}});

}  // namespace
}  // namespace torchspan::pipeline_memory_test
