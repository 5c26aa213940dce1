// What training keeps on a device besides gradients: steps of every optimizer, scaled gradients, checkpoints with the state
// of the device's generator, statistics of batch norms. The same on the CPU, or in one process, is the oracle.
#include <cmath>
#include <gmock/gmock.h>
#include <limits>

#include <torch/torch.h>

#include <torchspan/checkpoint.h>
#include <torchspan/data_parallel/sync_batch_norm.h>
#include <torchspan/optim.h>
#include <torchspan/optim/grad_scaler.h>

#include "tests/support/cluster_main.h"
#include "tests/support/device_group.h"

namespace torchspan::device_state_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;
using Tensors = std::vector<at::Tensor>;

/// Far above rounding: LibTorch's kernels round the options of fused steps to float.
constexpr double kTolerance = 1e-4;

bool agree(const at::Tensor& there, const at::Tensor& here, double tolerance = kTolerance) {
  return at::allclose(there.cpu().to(at::kDouble), here.to(at::kDouble), tolerance, tolerance);
}

Tensors leaves(c10::Device device, at::ScalarType dtype) {
  torch::manual_seed(11);
  Tensors made;
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{30, 40}, {7}, {}, {2, 3, 4}})
    made.push_back(torch::randn(shape).to(dtype).to(device).set_requires_grad(true));
  return made;
}

/// Gradients without values near zero, whose sign rounding could change.
void set_gradients(const Tensors& parameters, int step) {
  torch::manual_seed(100 + step);
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor drawn = torch::randn(parameter.sizes());
    parameter.mutable_grad() = (drawn + drawn.sign()).to(parameter.scalar_type()).to(parameter.device());
  }
}

/// `rate`: far larger than the tolerance, so that a step that is missing is seen.
std::vector<optim::OptimizerSpec> all_specs(bool master_weights, double rate) {
  const bool m = master_weights;
  return {optim::SGD{.lr = rate, .momentum = 0.9, .master_weights = m},
          optim::Adam{.lr = rate, .amsgrad = true, .master_weights = m},
          optim::AdamW{.lr = rate, .master_weights = m},
          optim::Adagrad{.lr = rate, .master_weights = m},
          optim::Adadelta{.lr = 50 * rate, .master_weights = m},
          optim::RMSprop{.lr = rate, .momentum = 0.5, .master_weights = m},
          optim::Rprop{.lr = rate, .master_weights = m},
          optim::Adamax{.lr = rate, .master_weights = m}};
}

class DeviceState : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto missing = TestDevices::missing(1); !missing.empty()) GTEST_SKIP() << missing;
    TestDevices::reset();
  }
  void TearDown() override { EXPECT_THAT(TestDevices::take_races(), IsEmpty()); }
};

TEST_F(DeviceState, OptimizersStepAsOnTheCpu) {
  struct Row {
    at::ScalarType dtype;
    bool master_weights;
    double tolerance;
  };
  for (const auto& [dtype, master_weights, tolerance] :
       {Row{at::kFloat, false, kTolerance}, Row{at::kBFloat16, true, 1e-2}}) {
    for (const optim::OptimizerSpec& spec : all_specs(master_weights, master_weights ? 0.1 : 0.01)) {
      const Tensors there = leaves(test_device(0), dtype), here = leaves(c10::kCPU, dtype);
      optim::Optimizer on_device(there, spec), on_cpu(here, spec);
      for (int step = 0; step < 5; ++step) {
        set_gradients(there, step);
        set_gradients(here, step);
        on_device.step();
        on_cpu.step();
      }
      for (std::size_t i = 0; i < here.size(); ++i) {
        EXPECT_TRUE(agree(there[i].detach(), here[i].detach(), tolerance))
            << spec.kind << " of " << c10::toString(dtype) << ", parameter " << i;
      }
    }
  }
}

TEST_F(DeviceState, GradScalerSkipsAStepWhoseGradientsAreNotFinite) {
  const at::Tensor parameter = torch::ones({1000}, test_device(0)).set_requires_grad(true);
  optim::Optimizer optimizer({parameter}, optim::SGD{.lr = 0.5});
  optim::GradScaler scaler({.init_scale = 1024});
  const auto iterate = [&](double gradient) {
    optimizer.zero_grad();
    scaler.scale((parameter * gradient).sum()).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  };
  EXPECT_TRUE(iterate(0.25));
  EXPECT_TRUE(agree(parameter.detach(), torch::full({1000}, 0.875)));
  EXPECT_FALSE(iterate(std::numeric_limits<double>::infinity()));
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_TRUE(iterate(0.25));
  EXPECT_TRUE(agree(parameter.detach(), torch::full({1000}, 0.75)));
}

/// Modules cannot be moved to stand-in devices, so parameters are made there.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : in(register_parameter("in", torch::randn({20, 30}).to(test_device(0)))),
        out(register_parameter("out", torch::randn({30, 5}).to(test_device(0)))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::relu(x.matmul(in)).matmul(out); }
  at::Tensor in, out;
};
TORCH_MODULE(Net);

/// A network with dropout on the device, so that its generator matters.
struct Trained {
  Trained() : optimizer(*net, optim::Adam{.lr = 0.01}) {}
  void step() {
    optimizer.zero_grad();
    const at::Tensor x = torch::randn({16, 20}, test_device(0));
    torch::dropout(net->forward(x), 0.5, /*train=*/true).pow(2).sum().backward();
    optimizer.step();
  }
  Tensors values() const {
    Tensors copies;
    for (const at::Tensor& parameter : net->parameters()) copies.push_back(parameter.detach().cpu().clone());
    return copies;
  }
  Net net;
  optim::Optimizer optimizer;
};

TEST_F(DeviceState, TrainingContinuesFromACheckpointBitForBit) {
  const TemporaryFolder folder;
  torch::manual_seed(5);
  Trained trained;
  CheckpointManager manager({.directory = folder.path()});
  manager.add("net", trained.net);
  manager.add("optimizer", trained.optimizer);
  for (int i = 0; i < 3; ++i) trained.step();
  manager.save(3);
  for (int i = 0; i < 4; ++i) trained.step();  // while the checkpoint is written
  const Tensors wanted = trained.values();
  manager.wait();
  torch::manual_seed(77);
  for (int i = 0; i < 2; ++i) trained.step();
  ASSERT_EQ(manager.restore(), 3);
  for (int i = 0; i < 4; ++i) trained.step();
  const Tensors got = trained.values();
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::equal(got[i], wanted[i])) << "parameter " << i;
}

TEST_F(DeviceState, SafetensorsFilesHoldTensorsOfTheDevice) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/tensors.safetensors";
  const at::Tensor large = torch::randn({3000, 1000}), half = torch::randn({33}).to(at::kHalf);
  checkpoint::save_safetensors(file,
                               {{"large", large.to(test_device(0))}, {"half", half.to(test_device(0))}});
  const auto loaded = checkpoint::load_safetensors(file);
  EXPECT_EQ(loaded.size(), 2);
  for (const auto& [name, tensor] : loaded)
    EXPECT_TRUE(at::equal(tensor, name == "large" ? large : half)) << name;
}

/// Two ranks that share the device normalize over both batches, as one process does over the whole batch.
void normalizes_over_ranks() {
  collective::GroupOptions options = ipc_options();
  with_device_group(options, ipc_services(), [](collective::Group& group, Executor&) {
    torch::manual_seed(3);
    const at::Tensor whole = torch::randn({10, 6, 4, 4}), weights = torch::randn({10, 6, 4, 4});
    const std::int64_t from = group.rank() == 0 ? 0 : 7, to = group.rank() == 0 ? 7 : 10;
    torch::nn::BatchNorm2d plain(torch::nn::BatchNormOptions(6)), moved(torch::nn::BatchNormOptions(6));
    for (at::Tensor* parameter : {&moved->weight, &moved->bias})
      *parameter = parameter->detach().to(test_device(0)).set_requires_grad(true);
    for (at::Tensor* buffer : {&moved->running_mean, &moved->running_var, &moved->num_batches_tracked})
      *buffer = buffer->to(test_device(0));
    SyncBatchNorm norm(*moved);
    norm->set_group(group);
    const auto part = [&](const at::Tensor& x) { return x.slice(0, from, to); };
    at::Tensor x = part(whole).to(test_device(0)).set_requires_grad(true);
    at::Tensor y = whole.clone().set_requires_grad(true);
    const at::Tensor ours = norm->forward(x), theirs = plain->forward(y);
    (ours * part(weights).to(test_device(0))).sum().backward();
    (theirs * weights).sum().backward();
    require(agree(ours.detach(), part(theirs.detach())), "the output");
    require(agree(x.grad(), part(y.grad())), "the gradient of the input");
    require(agree(norm->running_mean, plain->running_mean), "the running mean");
    require(agree(norm->running_var, plain->running_var), "the running variance");
    for (const std::string& race : TestDevices::take_races()) require(false, "no race: " + race);
  });
}

TEST_F(DeviceState, SyncBatchNormNormalizesOverTheBatchesOfTwoProcesses) {
  ProcessWorld world(2);
  for (int rank = 0; rank < 2; ++rank) world.start(rank, "device_state.normalizes_over_ranks");
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("device_state", {{"normalizes_over_ranks", normalizes_over_ranks}});

}  // namespace
}  // namespace torchspan::device_state_test
