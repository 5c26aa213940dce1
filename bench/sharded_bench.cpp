// Section sharded: the memory of a training step with divided state, for a transformer of 4 blocks and 400 MB on 4
// ranks, and its time, for one of 50 MB on 2 ranks, compared with DistributedDataParallel in the same run. Adam, one
// thread for each rank. Prints the section's JSON to stdout and a table to stderr.
//   --only NAME   only figures that begin with NAME
#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>

#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/session.h>
#include <torchspan/sharded.h>

#include "bench/harness.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using testing::Process;
using testing::ProcessWorld;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(std::int64_t width) : width(width) {
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).split(width, 1);
    const at::Tensor weights = at::softmax(at::matmul(parts[0], parts[1].t()), 1);
    const at::Tensor y = x + out(at::matmul(weights, parts[2]));
    return y + down(at::relu(up(y)));
  }
  std::int64_t width;
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  explicit NetImpl(std::int64_t width) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Sharded<Block>(width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<Sharded<Block>> blocks;
};
TORCH_MODULE(Net);

constexpr std::int64_t kWide = 1440, kNarrow = 512, kTokens = 16, kManyTokens = 128;

double status_mib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::stod(line.substr(key.size() + 1)) / 1024;
  }
  return 0;
}

/// One way to train.
struct Side {
  std::function<void()> step;
  std::function<double()> gathered_mib = [] { return 0.0; };
};

Side make_side(const std::string& kind, std::int64_t width, const collective::Group& group) {
  Net net(width);
  const at::Tensor x = at::randn({width == kWide ? kTokens : kManyTokens, width}) * 0.1;
  const optim::OptimizerSpec adam = optim::Adam({.lr = 1e-5});
  const auto step_of = [x](auto model, auto optimizer) {
    return [x, model, optimizer] {
      optimizer->zero_grad();
      (*model)(x).pow(2).mean().backward();
      optimizer->step();
    };
  };
  if (kind == "ddp") {
    auto model = std::make_shared<DistributedDataParallel<Net>>(net, group);
    return {step_of(model, std::make_shared<optim::Optimizer>(*net, adam))};
  }
  if (kind.starts_with("zero")) {
    auto model = std::make_shared<DistributedDataParallel<Net>>(net, group);
    const sharded::ZeroOptions options{.divide_gradients = kind == "zero_divided",
                                       .overlap_forward = kind == "zero_overlap"};
    return {step_of(model, std::make_shared<ZeroRedundancyOptimizer>(*model, adam, options))};
  }
  auto model = std::make_shared<FullyShardedDataParallel<Net>>(
      net, group, sharded::FullyShardedOptions{.reshard_after_forward = kind == "fully"});
  return {step_of(model, std::make_shared<optim::Optimizer>(*net, adam)),
          [model] { return static_cast<double>(model->stats().peak_bytes) / (1 << 20); }};
}

void write_figures(const std::map<std::string, double>& figures) {
  std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/figures.json")
      << nlohmann::json(figures);
}

void run_memory(Session& session, const std::string& kind) {
  const double before = status_mib("VmRSS");
  Side side = make_side(kind, kWide, session.group());
  std::ofstream("/proc/self/clear_refs") << "5";           // the peak counts from here
  for (int i = 0; i < rounds_or(2) + 1; ++i) side.step();  // the first step allocates the state
  const double resting = status_mib("RssAnon") + status_mib("RssShmem"), peak = status_mib("VmHWM") - before;
  if (session.rank() == 0)
    write_figures({{"peak", peak}, {"resting", resting}, {"gathered", side.gathered_mib()}});
}

void run_steps(Session& session) {
  std::map<std::string, Side> sides;
  std::map<std::string, std::vector<double>> samples;
  for (const char* kind : {"ddp", "zero", "zero_divided", "zero_overlap", "fully", "kept"})
    sides[kind] = make_side(kind, kNarrow, session.group());
  constexpr int kWarmUp = 5, kUsual = 20, kQuick = 5;
  for (int round = 0; round < kWarmUp + (is_quick() ? kQuick : kUsual); ++round) {
    for (auto& [kind, side] : sides) {
      session.group().barrier();
      const TimePoint began = session.runtime().executor.now();
      side.step();
      const auto took = session.runtime().executor.now() - began;
      if (round >= kWarmUp) samples[kind].push_back(std::chrono::duration<double, std::micro>(took).count());
    }
  }
  std::map<std::string, double> figures;
  for (auto& [kind, values] : samples) figures[kind] = percentile(values, 0.5);
  if (session.rank() == 0) write_figures(figures);
}

void run_rank(const std::string& scenario) {
  at::set_num_threads(1);
  Session session(WorkerOptions::from_env());
  scenario == "step" ? run_steps(session) : run_memory(session, scenario);
  session.shutdown();
}

std::map<std::string, double> measure(const std::string& scenario, int ranks) {
  ProcessWorld world(ranks);
  for (int rank = 0; rank < ranks; ++rank) world.start(rank, scenario);
  for (int rank = 0; rank < ranks; ++rank) {
    Process& process = world.process(static_cast<std::size_t>(rank));
    if (process.wait(world.executor(), std::chrono::minutes(8)) && process.exit_code() == 0) continue;
    std::fprintf(stderr, "sharded: rank %d of %s failed:\n%s\n", rank, scenario.c_str(),
                 process.output().c_str());
    return {};
  }
  std::ifstream file(world.folder() + "/figures.json");
  return nlohmann::json::parse(file).get<std::map<std::string, double>>();
}

void conduct(const std::string& only) {
  nlohmann::json metrics = nlohmann::json::array();
  const auto add = [&](const std::string& name, const std::string& unit, double value, double peer) {
    std::fprintf(stderr, "%-40s %10.1f %s\n", name.c_str(), value, unit.c_str());
    nlohmann::json metric{{"name", name}, {"unit", unit}, {"value", value}};
    if (peer > 0) metric["peer"] = "ddp", metric["peer_value"] = peer, metric["ratio"] = value / peer;
    metrics.push_back(std::move(metric));
  };
  if (std::string("sharded/step").starts_with(only)) {
    const auto steps = measure("step", 2);
    for (const auto& [kind, value] : steps) add("sharded/step/" + kind, "us", value, steps.at("ddp"));
  }
  double ddp = 0;
  for (const char* kind : {"ddp", "zero", "zero_divided", "kept", "fully"}) {
    const std::string name = std::string("sharded/memory/") + kind;
    if (!name.starts_with(only) && !only.starts_with(name)) continue;
    auto figures = measure(kind, 4);
    if (figures.empty()) continue;
    if (std::string(kind) == "ddp") ddp = figures["peak"];
    for (const auto& [figure, value] : figures)
      add(std::string("sharded/memory/") + kind + "/" + figure, "MiB", value, figure == "peak" ? ddp : 0);
  }
  print_section(metrics);
}

}  // namespace
}  // namespace torchspan::bench

int main(int argc, char** argv) {
  try {
    if (const char* scenario = std::getenv("TORCHSPAN_TEST_SCENARIO")) {
      torchspan::bench::run_rank(scenario);
    } else {
      const bool only = argc == 3 && std::string(argv[1]) == "--only";
      if (argc > 1 && !only) throw std::invalid_argument("sharded: the option is --only NAME");
      torchspan::bench::conduct(only ? argv[2] : "");
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
