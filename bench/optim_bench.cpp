// Section optim: steps in this process, compared with torch::optim and LibTorch's fused CPU kernels, and a step of
// another process's parameters, compared with the same step here plus a small call.
#include <cstdio>
#include <fstream>

#include <ATen/Parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/session.h>

#include "bench/harness.h"
#include "bench/optim/fused.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using namespace torchspan::optim;  // the options of both sides have the same names

constexpr int kRounds = 7;

std::vector<at::Tensor> parameters(int count, std::int64_t elements) {
  std::vector<at::Tensor> list;
  for (int i = 0; i < count; ++i) {
    at::Tensor leaf = at::ones({elements}).requires_grad_();
    leaf.mutable_grad() = at::full({elements}, 1e-3);
    list.push_back(leaf);
  }
  return list;
}

struct Size {
  const char* name;
  int count;
  std::int64_t elements;
  int repeats;
};
constexpr Size kSizes[] = {{"tensors_100", 100, 1000, 20}, {"tensor_64mib", 1, 16 << 20, 1}};

template <class Theirs, class Ours, class TheirOptions>
void compare(Bench& bench, const std::string& variant, Ours options, TheirOptions their_options) {
  for (const Size& size : kSizes) {
    const std::string optimizer = std::string(Ours::kName) + variant;
    const std::string name = "optim/local/" + optimizer + "/" + size.name;
    auto theirs = std::make_shared<Theirs>(parameters(size.count, size.elements), their_options);
    auto ours = std::make_shared<Optimizer>(parameters(size.count, size.elements), options);
    bench.add(name + "/libtorch", size.repeats, [theirs] { theirs->step(); });
    bench.add(name, size.repeats, [ours] { ours->step(); }, {.peer = name + "/libtorch"});
    const auto fused = fused_step(optimizer, parameters(size.count, size.elements));
    if (!fused) continue;
    auto same = std::make_shared<Optimizer>(parameters(size.count, size.elements), options);
    bench.add(name + "/libtorch_fused", size.repeats, fused);
    bench.add(name + "/fused", size.repeats, [same] { same->step(); }, {.peer = name + "/libtorch_fused"});
  }
}

nlohmann::json local_metrics() {
  const auto executor = make_executor();
  Bench bench(*executor);
  compare<torch::optim::SGD>(bench, "", SGD{.lr = 1e-3}, torch::optim::SGDOptions(1e-3));
  compare<torch::optim::SGD>(bench, "_momentum", SGD{.lr = 1e-3, .momentum = 0.9, .weight_decay = 0.01},
                             torch::optim::SGDOptions(1e-3).momentum(0.9).weight_decay(0.01));
  compare<torch::optim::Adam>(bench, "", Adam{}, torch::optim::AdamOptions());
  compare<torch::optim::AdamW>(bench, "", AdamW{}, torch::optim::AdamWOptions());
  compare<torch::optim::Adagrad>(bench, "", Adagrad{}, torch::optim::AdagradOptions());
  compare<torch::optim::RMSprop>(bench, "", RMSprop{}, torch::optim::RMSpropOptions());
  bench.run(rounds_or(kRounds));
  return bench.metrics();
}

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    for (int i = 0; i < 10; ++i) layers->push_back(torch::nn::Linear(256, 256));
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Tower);

std::int64_t nothing(std::int64_t x) { return x; }

constexpr Class<Tower> kTower{"Tower"};
constexpr Function<&TowerImpl::forward> kForward{"Tower.forward"};
constexpr Function<nothing> kNothing{"nothing"};

/// One of two processes: rank 0 steps a local tower and one on rank 1.
void run_rank() {
  at::set_num_threads(1);
  FunctionTable functions;
  functions.add(kTower, kForward, kNothing);
  Session session(WorkerOptions::from_env(), functions);
  if (session.rank() == 0) {
    const Worker worker = session.worker();
    Tower here;
    here->forward(at::ones({4, 256})).sum().backward();
    auto there = worker.remote("worker1", kTower);
    autograd::Context context(session);
    context.backward(there.rpc_sync(kForward, at::ones({4, 256})).sum());
    Optimizer local(*here, Adam{});
    DistributedOptimizer distributed(session, Adam{}, {there});
    Bench bench(session.worker().runtime().executor);
    bench.add("optim/step/local", 20, [&] { local.step(); });
    bench.add("optim/step/small_call", 20, [&] { worker.rpc_sync("worker1", kNothing, 1); });
    bench.add("optim/step/distributed", 20, [&] { distributed.step(context); }, {.peer = "optim/step/local"});
    bench.run(rounds_or(kRounds));
    std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/metrics.json") << bench.metrics();
  }
  session.shutdown();
}

/// Returns the metrics of the two processes, and the distributed step's time compared with the local step
/// plus one call.
nlohmann::json distributed_metrics() {
  testing::ProcessWorld world(2);
  for (int rank = 0; rank < 2; ++rank) world.start(rank, "step");
  for (int rank = 0; rank < 2; ++rank) {
    testing::Process& process = world.process(static_cast<std::size_t>(rank));
    if (process.wait(world.executor(), std::chrono::minutes(3)) && process.exit_code() == 0) continue;
    std::fprintf(stderr, "optim: rank %d failed:\n%s\n", rank, process.output().c_str());
    return nlohmann::json::array();
  }
  std::ifstream file(world.folder() + "/metrics.json");
  nlohmann::json list = nlohmann::json::parse(file);
  const double local = list[0]["value"], call = list[1]["value"], distributed = list[2]["value"];
  list.push_back({{"name", "optim/step_overhead"},
                  {"unit", "us"},
                  {"value", distributed},
                  {"peer", "local step and one small call"},
                  {"peer_value", local + call},
                  {"ratio", distributed / (local + call)}});
  return list;
}

}  // namespace
}  // namespace torchspan::bench

int main() {
  using namespace torchspan::bench;
  if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) {
    run_rank();
    return 0;
  }
  at::set_num_threads(1);
  nlohmann::json metrics = distributed_metrics();
  for (auto& metric : local_metrics()) metrics.push_back(metric);
  print_section(metrics);
}
