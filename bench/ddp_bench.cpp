// Section ddp: a training step with gradients averaged over two processes of this host, compared with the same
// step without communication, and with PyTorch's DistributedDataParallel over Gloo (python3-torch) in the same
// run. Prints the section's JSON to stdout and a table to stderr.
//   --rounds N      number of rounds (5)
//   --model NAME    only this model
//   --no-peer       do not run PyTorch
// In every round, each measurement starts its processes.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>

#include <torchspan/data_parallel.h>
#include <torchspan/session.h>

#include "bench/ddp/workloads.h"
#include "bench/harness.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using testing::Process;
using testing::ProcessWorld;
using Samples = std::map<std::string, std::vector<double>>;

/// Warm-up steps that are not counted: allocators fill their caches, and buckets are rebuilt.
constexpr int kWarmUp = 3;
/// A factor for more steps where a small difference is measured.
constexpr int kStepsAlone = 4;
/// From the repository's root, where `make bench` runs.
constexpr const char* kPeer = "bench/peers/torch_ddp.py";
constexpr const char* kPython = "/usr/bin/python3";

std::string samples_file(const std::string& folder) { return folder + "/samples.json"; }

template <class Net>
std::function<void()> make_step(Net& net, const Workload& workload,
                                const std::shared_ptr<torch::optim::SGD>& optimizer) {
  return [&net, workload, optimizer] {
    optimizer->zero_grad();
    at::mse_loss(net.forward(workload.input), workload.target).backward();
    optimizer->step();
  };
}

std::shared_ptr<torch::optim::SGD> make_optimizer(const Workload& workload) {
  return std::make_shared<torch::optim::SGD>(workload.net->parameters(), torch::optim::SGDOptions(0.01));
}

/// One rank: steps with communication and without, in turns. A "together" step ends when the slower rank is
/// done, like every step with communication.
void run_rank(const std::string& name) {
  at::set_num_threads(1);
  Session session(WorkerOptions::from_env());
  Samples samples;
  {
    const collective::Group group = session.group();
    const Workload plain = make_workload(name), replicated = make_workload(name);
    DistributedDataParallel wrapped(replicated.net, group);
    const std::vector<std::pair<std::string, std::function<void()>>> sides = {
        {"plain", make_step(*plain.net, plain, make_optimizer(plain))},
        {"together", make_step(*plain.net, plain, make_optimizer(plain))},
        {"step", make_step(wrapped, replicated, make_optimizer(replicated))}};
    const int steps = workload_steps(name) * (group.size() == 1 ? kStepsAlone : 1);
    for (int i = 0; i < steps + kWarmUp; ++i) {
      for (const auto& [side, step] : sides) {
        group.barrier();
        const TimePoint began = session.runtime().executor.now();
        step();
        if (side == "together") group.barrier();
        const auto took = session.runtime().executor.now() - began;
        if (i >= kWarmUp) samples[side].push_back(std::chrono::duration<double, std::micro>(took).count());
      }
    }
    if (session.rank() == 0) {
      std::ofstream(samples_file(std::getenv("TORCHSPAN_RUNTIME_DIR"))) << nlohmann::json(samples);
    }
  }
  session.shutdown();
}

/// Returns the median of each kind of sample; empty if the processes failed.
std::map<std::string, double> measure(const std::string& model, int ranks, bool peer) {
  ProcessWorld world(ranks);
  const int steps = workload_steps(model) * (ranks == 1 ? kStepsAlone : 1);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> through;
    if (peer) through = {kPython, kPeer, model, std::to_string(steps)};
    world.start(rank, model, {}, through);
  }
  std::map<std::string, double> middles;
  for (int rank = 0; rank < ranks; ++rank) {
    Process& process = world.process(static_cast<std::size_t>(rank));
    if (process.wait(world.executor(), std::chrono::minutes(3)) && process.exit_code() == 0) continue;
    std::fprintf(stderr, "ddp: rank %d of %s failed:\n%s\n", rank, peer ? "PyTorch" : "ours",
                 process.output().c_str());
    return middles;
  }
  std::ifstream file(samples_file(world.folder()));
  for (auto& [side, values] : nlohmann::json::parse(file).get<Samples>()) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    middles[side] = values[values.size() / 2];
  }
  return middles;
}

struct Report {
  std::map<std::string, std::vector<double>> rounds;  ///< by figure

  void add(const std::string& prefix, const std::map<std::string, double>& middles) {
    for (const auto& [side, value] : middles) rounds[prefix + "/" + side].push_back(value);
    if (middles.contains("plain")) {
      rounds[prefix + "/overhead"].push_back(middles.at("step") / middles.at("plain"));
      rounds[prefix + "/together_overhead"].push_back(middles.at("step") / middles.at("together"));
    }
  }
  double middle(const std::string& name) const {
    const auto found = rounds.find(name);
    if (found == rounds.end() || found->second.empty()) return 0;
    std::vector<double> values = found->second;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
  nlohmann::json metrics() const {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& [name, values] : rounds) {
      if (name.starts_with("torch_ddp/")) continue;
      const bool is_ratio = name.ends_with("overhead");
      nlohmann::json metric{
          {"name", name}, {"unit", is_ratio ? "ratio" : "us"}, {"value", middle(name)}, {"rounds", values}};
      const std::string peer = "torch_ddp/" + name.substr(name.find('/') + 1);
      if (const double theirs = middle(peer); theirs > 0) {
        metric["peer"] = peer;
        metric["peer_value"] = theirs;
        metric["ratio"] = middle(name) / theirs;
      }
      std::fprintf(stderr, "%-24s %12.2f %-5s   peer %12.2f\n", name.c_str(), middle(name),
                   is_ratio ? "" : "us", middle(peer));
      list.push_back(std::move(metric));
    }
    return list;
  }
};

struct Arguments {
  int rounds = rounds_or(5);
  std::string model = {};
  bool peer = true;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--no-peer") {
      arguments.peer = false;
    } else if (word == "--rounds" && i + 1 < argc) {
      arguments.rounds = std::stoi(argv[++i]);
    } else if (word == "--model" && i + 1 < argc) {
      arguments.model = argv[++i];
    } else {
      throw std::invalid_argument("ddp: '" + word +
                                  "' is not an option: --rounds N, --model NAME, --no-peer");
    }
  }
  return arguments;
}

void conduct(const Arguments& arguments) {
  Report report;
  const bool peer = arguments.peer && std::filesystem::exists(kPython) && std::filesystem::exists(kPeer);
  if (arguments.peer && !peer)
    std::fprintf(stderr, "ddp: skipping the peer: %s or %s is missing\n", kPython, kPeer);
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const std::string& model : workload_names()) {
      if (!arguments.model.empty() && model != arguments.model) continue;
      std::fprintf(stderr, "round %d of %d: %s\n", round + 1, arguments.rounds, model.c_str());
      report.add("ddp/" + model, measure(model, 2, false));
      if (peer) report.add("torch_ddp/" + model, measure(model, 2, true));
      if (model != "many") continue;
      // In a world of one, the difference is the reducer's own work, for parameters whose gradients are in
      // the buckets.
      const auto alone = measure(model, 1, false);
      if (alone.contains("plain")) {
        report.rounds["ddp/hook_per_parameter"].push_back((alone.at("step") - alone.at("plain")) / 2000);
      }
    }
  }
  print_section(report.metrics());
}

}  // namespace
}  // namespace torchspan::bench

int main(int argc, char** argv) {
  try {
    if (const char* model = std::getenv("TORCHSPAN_TEST_SCENARIO")) {
      torchspan::bench::run_rank(model);
    } else {
      torchspan::bench::conduct(torchspan::bench::parse(argc, argv));
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
