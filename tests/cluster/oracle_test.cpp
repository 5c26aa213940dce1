// Shows that distributed training computes what one process computes: the same model, data and seed, trained
// for 20 steps in one process by LibTorch's engine and optimizers, and in three processes by TorchSpan; every
// parameter must be equal.
#include <torch/torch.h>

#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::oracle_test {
namespace {

using testing::expect_all_end_well;
using testing::ProcessWorld;

constexpr std::int64_t kFeatures = 12, kHidden = 16, kClasses = 5, kBatch = 8;
constexpr int kSteps = 20;

/// One half of the model; (seed, dtype) give the same parameters in every process.
struct HalfImpl : torch::nn::Module {
  HalfImpl(std::int64_t seed, std::int64_t in, std::int64_t out, bool is_double) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    first = register_module("first", torch::nn::Linear(in, kHidden));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kHidden})));
    second = register_module("second", torch::nn::Linear(kHidden, out));
    to(is_double ? torch::kDouble : torch::kFloat);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::gelu(norm(first(x)))); }
  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> list;
    for (const auto& parameter : parameters()) list.push_back(parameter.detach().clone());
    return list;
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Half);

constexpr Class<Half, std::int64_t, std::int64_t, std::int64_t, bool> kHalf{"Half"};
constexpr Function<&HalfImpl::forward> kForward{"Half.forward"};
constexpr Function<&HalfImpl::values> kValues{"Half.values"};

struct Batch {
  torch::Tensor data, target;
};

std::vector<Batch> batches(bool is_double) {
  torch::manual_seed(99);
  std::vector<Batch> list;
  for (int i = 0; i < kSteps; ++i) {
    list.push_back({torch::randn({kBatch, kFeatures}, is_double ? torch::kDouble : torch::kFloat),
                    torch::randint(kClasses, {kBatch}, torch::kLong)});
  }
  return list;
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return torch::nll_loss(torch::log_softmax(scores, 1), target);
}

/// Parameters of both halves and of the trainer's own head after training in this process alone.
std::vector<torch::Tensor> train_alone(bool is_double, bool adagrad) {
  Half a(1, kFeatures, kHidden, is_double), b(2, kHidden, kHidden, is_double),
      head(3, kHidden, kClasses, is_double);
  std::vector<torch::Tensor> parameters;
  for (auto* half : {&a, &b, &head}) {
    for (auto& parameter : (*half)->parameters()) parameters.push_back(parameter);
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (adagrad) {
    optimizer = std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.05));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  for (const Batch& batch : batches(is_double)) {
    optimizer->zero_grad();
    loss_of(head(b(a(batch.data))), batch.target).backward();
    optimizer->step();
  }
  for (auto& parameter : parameters) parameter = parameter.detach();
  return parameters;
}

std::vector<torch::Tensor> train_together(Session& session, bool is_double, bool adagrad) {
  Worker& worker = session.worker();
  auto a = worker.remote("worker1", kHalf, 1, kFeatures, kHidden, is_double);
  auto b = worker.remote("worker2", kHalf, 2, kHidden, kHidden, is_double);
  Half head(3, kHidden, kClasses, is_double);
  const optim::OptimizerSpec spec = adagrad ? optim::OptimizerSpec(optim::Adagrad{.lr = 0.05})
                                            : optim::OptimizerSpec(optim::SGD{.lr = 0.1, .momentum = 0.9});
  optim::DistributedOptimizer optimizer(worker, spec, {a, b, head});
  for (const Batch& batch : batches(is_double)) {
    autograd::Context context(session);
    const torch::Tensor hidden = b.rpc_sync(kForward, a.rpc_sync(kForward, batch.data));
    context.backward(loss_of(head(hidden), batch.target));
    optimizer.step(context);
  }
  std::vector<torch::Tensor> parameters;
  for (const auto& list : {a.rpc_sync(kValues), b.rpc_sync(kValues), head->values()}) {
    parameters.insert(parameters.end(), list.begin(), list.end());
  }
  return parameters;
}

void compare(Session& session, bool is_double, bool adagrad) {
  const auto expected = train_alone(is_double, adagrad);
  const auto actual = train_together(session, is_double, adagrad);
  // Kernels of the optimizers and of BLAS round differently from CPU to CPU, and the steps add these differences up. The
  // comparison of doubles is the strict one.
  const double tolerance = is_double ? 1e-12 : 1e-5;
  if (actual.size() != expected.size() || expected.size() != 18)
    throw std::runtime_error("parameters are missing");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double scale = expected[i].abs().max().item<double>();
    const double difference = (actual[i] - expected[i]).abs().max().item<double>();
    if (!(difference <= tolerance * scale)) {
      throw std::runtime_error("parameter " + std::to_string(i) + " differs by " +
                               std::to_string(difference / scale));
    }
  }
  // The comparison must use trained parameters, not the initial ones.
  Half fresh(1, kFeatures, kHidden, is_double);
  if (torch::allclose(fresh->values()[0], actual[0], 1e-3, 1e-3))
    throw std::runtime_error("nothing was trained");
}

void oracle() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kHalf, kForward, kValues));
  if (session.rank() == 0) {
    for (bool is_double : {false, true}) {
      for (bool adagrad : {false, true}) compare(session, is_double, adagrad);
    }
  }
  session.shutdown();
}

// peer: test_cpp_rpc TestE2ETensorPipe.TestTrainingLoop: better: compared with one process, parameter by
//   parameter
TEST(Oracle, ThreeProcessesTrainAsOneDoes) {
  ProcessWorld world(3);
  world.start_all("oracle.oracle");
  expect_all_end_well(world, std::chrono::seconds(120));
}

TEST(Oracle, AWorldOfOneTrainsAsOneProcessDoes) {
  // The same program without a launcher: every destination is this worker.
  Session session(WorkerOptions{}, FunctionTable().add(kHalf, kForward, kValues));
  Worker& worker = session.worker();
  auto a = worker.remote(0, kHalf, 1, kFeatures, kHidden, true);
  a.creation().wait();  // both draw from this process's only generator, so one after the other
  Half reference(1, kFeatures, kHidden, true);
  torch::optim::SGD expected(reference->parameters(), torch::optim::SGDOptions(0.1));
  optim::DistributedOptimizer optimizer(worker, optim::SGD{.lr = 0.1}, {a});
  for (const Batch& batch : batches(true)) {
    expected.zero_grad();
    reference(batch.data).pow(2).mean().backward();
    expected.step();
    autograd::Context context(session);
    context.backward(a.rpc_sync(kForward, batch.data).pow(2).mean());
    optimizer.step(context);
  }
  const auto values = a.rpc_sync(kValues);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(torch::allclose(values[i], reference->values()[i], 1e-12, 1e-12)) << "parameter " << i;
  }
  session.shutdown();
}

const testing::Scenarios kScenarios("oracle", {{"oracle", oracle}});

}  // namespace
}  // namespace torchspan::oracle_test
