// Section pipeline: steps of two processes of this host, compared with the time that their schedule predicts, with one
// process, and with PyTorch's sync.Pipe or torch.distributed.pipelining in the same run. Prints the section's JSON to
// stdout and a table to stderr.
//   --rounds N   number of rounds (5)
//   --no-peer    do not run PyTorch
//   --delay MS --rate MBIT --loss PERCENT   measures schedules on two simulated hosts (root only) with such a link, and the
//                share of a step in which a worker is idle; a process in user space is the link
// In every round, each measurement starts its processes.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <torchspan/pipeline.h>
#include <torchspan/session.h>

#include "bench/harness.h"
#include "bench/slow_link.h"
#include "session/session_on_host.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using testing::Process;
using testing::ProcessWorld;
using Samples = std::map<std::string, std::vector<double>>;

constexpr int kWarmUp = 2;
constexpr int kMicroBatches = 8;
constexpr const char* kPython = "/usr/bin/python3";
/// A peer that this PyTorch does not have exits with this code.
constexpr int kNotInThisRelease = 77;

/// A script of PyTorch for Python; PyTorch has one or the other, depending on the release.
struct Peer {
  const char* name;
  const char* script;
  int workers;
};
constexpr Peer kPeers[] = {{"torch_sync_pipe", "bench/peers/torch_pipe.py", 1},
                           {"torch_pipelining", "bench/peers/torch_pipelining.py", 2}};
/// The peers have the same layers.
constexpr std::int64_t kWidth = 256, kRows = 512;
constexpr int kLayers = 8, kSteps = 6;

/// Keeps its core busy for a set time, forward and backward, so that the excess of a step over its plan is
/// the pipeline's own time.
struct Busy : torch::autograd::Function<Busy> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t executor, std::int64_t microseconds) {
    context->saved_data["executor"] = executor;
    context->saved_data["microseconds"] = microseconds;
    spin(executor, microseconds);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    spin(context->saved_data["executor"].toInt(), context->saved_data["microseconds"].toInt());
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
  static void spin(std::int64_t executor, std::int64_t microseconds) {
    const auto& clock = *reinterpret_cast<Executor*>(executor);
    const TimePoint end = clock.now() + std::chrono::microseconds(microseconds);
    while (clock.now() < end) {
    }
  }
};

/// A weight whose gradient keeps the core busy.
struct BusyWeight : torch::autograd::Function<BusyWeight> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight,
                            std::int64_t executor, std::int64_t microseconds) {
    context->saved_data["executor"] = executor;
    context->saved_data["microseconds"] = microseconds;
    return weight.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    Busy::spin(context->saved_data["executor"].toInt(), context->saved_data["microseconds"].toInt());
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

struct SpinnerImpl : torch::nn::Module {
  SpinnerImpl(Executor* given, std::int64_t time, bool split)
      : executor(given), microseconds(time), busy_weight(split) {
    weight = register_parameter("weight", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto clock = reinterpret_cast<std::int64_t>(executor);
    const at::Tensor factor = busy_weight ? BusyWeight::apply(weight, clock, microseconds) : weight;
    return Busy::apply(x * factor, clock, microseconds);
  }
  Executor* executor;
  std::int64_t microseconds;
  bool busy_weight;  ///< its gradient takes as long as that of the input
  at::Tensor weight;
};
TORCH_MODULE(Spinner);

struct RealImpl : torch::nn::Module {
  RealImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Real);

double microseconds(Duration time) { return std::chrono::duration<double, std::micro>(time).count(); }
at::Tensor mean_of(const at::Tensor& output, const at::Tensor&) { return output.mean(); }
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

bool splits_backwards(Schedule schedule) {
  return schedule == Schedule::kZBH1 || schedule == Schedule::kZBH2 || schedule == Schedule::kZB1P ||
         schedule == Schedule::kZBV || schedule == Schedule::kDualPipeV;
}

int stages_per_worker(Schedule schedule) {
  const bool two = schedule == Schedule::kInterleaved || schedule == Schedule::kZB1P ||
                   schedule == Schedule::kZBV || schedule == Schedule::kDualPipeV;
  return two ? 2 : 1;
}

/// Costs of stages whose actions take `time`. The first stage runs a split backward whole, as weight gradient.
std::vector<schedule::Costs> spinner_costs(int stages, bool split, std::int64_t time) {
  const Duration each = std::chrono::microseconds(time);
  std::vector<schedule::Costs> costs(
      static_cast<std::size_t>(stages),
      {.forward = each, .input_gradient = each, .weight_gradient = split ? each : Duration::zero()});
  if (split) costs[0] = {.forward = each, .input_gradient = Duration::zero(), .weight_gradient = 2 * each};
  return costs;
}

/// Measures steps whose actions take `time`, and computes the time that their schedule predicts.
void timed_steps(Session& session, Schedule schedule, std::int64_t time, int steps, Samples& samples) {
  Executor& executor = session.runtime().executor;
  const int workers = static_cast<int>(session.world_size());
  const int stages = workers * stages_per_worker(schedule);
  const bool split = splits_backwards(schedule);
  Layers layers;
  for (int stage = 0; stage < stages; ++stage) layers.add<Spinner>(&executor, time, split);
  PipelineOptions options;
  options.balance.assign(static_cast<std::size_t>(stages), 1);
  options.micro_batches = kMicroBatches;
  options.schedule = schedule;
  options.checkpoint = pipeline::ActivationCheckpoint::kNever;
  Pipeline pipe(session.worker(), layers, options);
  const at::Tensor x = at::ones({kMicroBatches, 4});
  for (int i = 0; i < steps + kWarmUp; ++i) {
    const TimePoint began = executor.now();
    pipe.train_step(x, x, mean_of);
    if (i < kWarmUp) continue;
    samples["step"].push_back(microseconds(executor.now() - began));
    const auto& table = pipe.last_step().table;
    // Order of arrival has no plan; the step is compared with that of 1F1B.
    const auto plan =
        table.actions.empty() ? schedule::one_forward_one_backward({workers, kMicroBatches, 1}) : table;
    samples["plan"].push_back(
        microseconds(schedule::simulate(plan, spinner_costs(stages, split, time)).makespan));
    samples["task"].push_back(samples["step"].back() / (2.0 * kMicroBatches * stages / workers));
  }
}

/// Measures steps of real layers; with one worker, also a plain loop without a pipeline.
void real_steps(Session& session, Schedule schedule, Samples& samples) {
  Executor& executor = session.runtime().executor;
  torch::manual_seed(7);
  Layers layers;
  for (int layer = 0; layer < kLayers; ++layer) layers.add<Real>();
  PipelineOptions options;
  options.micro_batches = kMicroBatches;
  options.schedule = schedule;
  options.checkpoint = pipeline::ActivationCheckpoint::kNever;
  Pipeline pipe(session.worker(), layers, options);
  std::vector<Real> plain;
  for (int layer = 0; layer < kLayers; ++layer) plain.emplace_back();
  const at::Tensor x = at::randn({kRows, kWidth}), y = at::randn({kRows, kWidth});
  for (int i = 0; i < kSteps + kWarmUp; ++i) {
    for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
    const TimePoint began = executor.now();
    pipe.train_step(x, y, mean_square);
    if (i >= kWarmUp) samples["step"].push_back(microseconds(executor.now() - began));
    if (session.world_size() > 1) continue;
    const TimePoint again = executor.now();
    at::Tensor z = x;
    for (Real& layer : plain) {
      layer->zero_grad();
      z = layer->forward(z);
    }
    mean_square(z, y).backward();
    if (i >= kWarmUp) samples["plain"].push_back(microseconds(executor.now() - again));
  }
}

struct Case {
  std::string name;
  Schedule schedule;
  int workers = 2;
  std::int64_t microseconds = -1;  ///< -1: real layers
};

std::vector<Case> cases() {
  return {{"makespan/arrival", Schedule::kArrival, 2, 5000},
          {"makespan/gpipe", Schedule::kGPipe, 2, 5000},
          {"makespan/1f1b", Schedule::k1F1B, 2, 5000},
          {"makespan/interleaved", Schedule::kInterleaved, 2, 5000},
          {"makespan/zb_h1", Schedule::kZBH1, 2, 5000},
          {"makespan/zb_h2", Schedule::kZBH2, 2, 5000},
          {"makespan/zb1p", Schedule::kZB1P, 2, 5000},
          {"makespan/zb_v", Schedule::kZBV, 2, 5000},
          {"makespan/dual_pipe_v", Schedule::kDualPipeV, 2, 5000},
          {"task_overhead/1f1b", Schedule::k1F1B, 2, 0},
          {"task_overhead/arrival", Schedule::kArrival, 2, 0},
          {"throughput/two", Schedule::k1F1B, 2, -1},
          {"throughput/two_gpipe", Schedule::kGPipe, 2, -1},
          {"throughput/two_zb_h1", Schedule::kZBH1, 2, -1},
          {"throughput/one", Schedule::k1F1B, 1, -1}};
}

void run_rank(const std::string& name) {
  at::set_num_threads(1);
  const char* const host = std::getenv("BENCH_HOST");  // hosts are simulated on one kernel
  Session session = host == nullptr ? Session(WorkerOptions::from_env())
                                    : make_session_on_host(host, WorkerOptions::from_env());
  Samples samples;
  for (const Case& one : cases()) {
    if (one.name != name) continue;
    if (one.microseconds < 0) {
      real_steps(session, one.schedule, samples);
    } else {
      timed_steps(session, one.schedule, one.microseconds, one.microseconds == 0 ? 100 : kSteps, samples);
    }
  }
  if (session.rank() == 0) {
    std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/samples.json")
        << nlohmann::json(samples);
  }
  session.shutdown();
}

using Middles = std::map<std::string, double>;

/// Waits for the processes; returns the median of each kind of sample, or none if one of them failed.
Middles finish(ProcessWorld& world, const std::string& name) {
  const int workers = static_cast<int>(world.size());
  Middles middles;
  for (int rank = 0; rank < workers; ++rank) {
    Process& process = world.process(static_cast<std::size_t>(rank));
    const bool ended = process.wait(world.executor(), std::chrono::minutes(3));
    if (ended && process.exit_code() == 0) continue;
    if (!(ended && process.exit_code() == kNotInThisRelease)) {
      std::fprintf(stderr, "pipeline: rank %d of %s failed:\n%s\n", rank, name.c_str(),
                   process.output().c_str());
    }
    return middles;
  }
  std::ifstream file(world.folder() + "/samples.json");
  for (auto& [side, values] : nlohmann::json::parse(file).get<Samples>()) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                     values.end());
    middles[side] = values[values.size() / 2];
  }
  return middles;
}

/// The median of each kind of sample; empty if the processes failed or the peer is not in this PyTorch. `script`
/// is a peer's; empty for TorchSpan.
Middles measure(const std::string& name, int workers, const std::string& script) {
  ProcessWorld world(workers);
  for (int rank = 0; rank < workers; ++rank) {
    std::vector<std::string> through;
    if (!script.empty()) through = {kPython, script, std::to_string(kMicroBatches), std::to_string(kSteps)};
    world.start(rank, name, {}, through);
  }
  return finish(world, name);
}

/// The same on two hosts, with one worker each.
Middles measure_on_hosts(const testing::SlowNetwork& network, const std::string& name) {
  ProcessWorld world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world.start(rank, name,
                {{"MASTER_ADDR", testing::SlowNetwork::kNear},
                 {"LOCAL_WORLD_SIZE", "1"},
                 {"LOCAL_RANK", "0"},
                 {"BENCH_HOST", rank == 0 ? "near" : "far"}},
                (rank == 0 ? network.near : network.far).through());
  }
  return finish(world, name);
}

double middle(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

using Rounds = std::map<std::string, std::vector<double>>;

nlohmann::json metrics(const Rounds& rounds) {
  const auto value = [&](const std::string& name) {
    return rounds.contains(name) ? middle(rounds.at(name)) : 0.0;
  };
  nlohmann::json list = nlohmann::json::array();
  const auto add = [&](const std::string& name, const std::string& mine, const std::string& peer) {
    if (value(mine) == 0) return;
    nlohmann::json metric{
        {"name", "pipeline/" + name}, {"unit", "us"}, {"value", value(mine)}, {"rounds", rounds.at(mine)}};
    if (value(peer) > 0) {
      metric["peer"] = peer;
      metric["peer_value"] = value(peer);
      metric["ratio"] = value(mine) / value(peer);
    }
    std::fprintf(stderr, "%-28s %12.1f us   %-24s %12.1f us   %.3f\n", name.c_str(), value(mine),
                 peer.c_str(), value(peer), value(peer) > 0 ? value(mine) / value(peer) : 0.0);
    list.push_back(std::move(metric));
  };
  for (const char* schedule :
       {"arrival", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb1p", "zb_v", "dual_pipe_v"}) {
    const std::string name = std::string("makespan/") + schedule;
    add(name + "/p2m8", name + "/step", name + "/plan");
  }
  add("task_overhead/1f1b", "task_overhead/1f1b/task", "");
  add("task_overhead/arrival", "task_overhead/arrival/task", "");
  add("step/mlp/1f1b", "throughput/two/step", "");
  add("step/mlp/zb_h1", "throughput/two_zb_h1/step", "throughput/two/step");
  add("throughput/mlp/plain", "throughput/two/step", "throughput/one/plain");
  add("throughput/mlp_gpipe/plain", "throughput/two_gpipe/step", "throughput/one/plain");
  add("throughput/mlp_one_worker/plain", "throughput/one/step", "throughput/one/plain");
  add("throughput/mlp/torch_sync_pipe", "throughput/two/step", "torch_sync_pipe/step");
  add("throughput/torch_sync_pipe/torch_plain", "torch_sync_pipe/step", "torch_sync_pipe/plain");
  add("throughput/mlp/torch_pipelining", "throughput/two/step", "torch_pipelining/1f1b");
  add("throughput/mlp_gpipe/torch_pipelining", "throughput/two_gpipe/step", "torch_pipelining/gpipe");
  return list;
}

void conduct(int count, bool peer) {
  if (peer && !(std::filesystem::exists(kPython) && std::filesystem::exists(kPeers[0].script))) {
    std::fprintf(stderr, "pipeline: skipping the peer: %s or %s is missing\n", kPython, kPeers[0].script);
    peer = false;
  }
  Rounds rounds;
  for (int round = 0; round < count; ++round) {
    std::fprintf(stderr, "round %d of %d\n", round + 1, count);
    for (const Case& one : cases()) {
      for (const auto& [side, value] : measure(one.name, one.workers, ""))
        rounds[one.name + "/" + side].push_back(value);
    }
    if (!peer) continue;
    for (const Peer& other : kPeers) {
      for (const auto& [side, value] : measure(other.name, other.workers, other.script)) {
        rounds[std::string(other.name) + "/" + side].push_back(value);
      }
    }
  }
  print_section(metrics(rounds));
}

/// Schedules on two hosts: the time of a step against that of its plan, whose transfers take no time, and the share of
/// the step in which a worker runs no action.
void conduct_on_hosts(int count, const testing::LinkQuality& link) {
  const testing::SlowNetwork network(link);
  if (!network.trouble().empty()) throw std::runtime_error("no two hosts: " + network.trouble());
  nlohmann::json list = nlohmann::json::array();
  for (const Case& one : cases()) {
    if (!one.name.starts_with("makespan/") || stages_per_worker(one.schedule) != 1) continue;
    std::vector<double> steps, plans;
    for (int round = 0; round < count; ++round) {
      Middles middles = measure_on_hosts(network, one.name);
      if (middles.empty()) continue;
      steps.push_back(middles["step"]);
      plans.push_back(middles["plan"]);
    }
    if (steps.empty()) continue;
    const double passes = splits_backwards(one.schedule) ? 3 : 2;
    const double busy = passes * kMicroBatches * static_cast<double>(one.microseconds);
    const double step = middle(steps), plan = middle(plans);
    const std::string name = "pipeline/" + one.name + "/p2m8/hosts";
    list.push_back({{"name", name},
                    {"unit", "us"},
                    {"value", step},
                    {"rounds", steps},
                    {"peer", one.name + "/plan"},
                    {"peer_value", plan},
                    {"ratio", step / plan}});
    list.push_back({{"name", name + "/idle"},
                    {"unit", "share"},
                    {"value", 1 - busy / step},
                    {"peer", one.name + "/plan/idle"},
                    {"peer_value", 1 - busy / plan}});
    std::fprintf(stderr, "%-28s %10.1f us, plan %10.1f us; idle %4.1f %%, plan %4.1f %%\n", one.name.c_str(),
                 step, plan, 100 * (1 - busy / step), 100 * (1 - busy / plan));
  }
  print_section(list);
}

}  // namespace
}  // namespace torchspan::bench

int main(int argc, char** argv) {
  try {
    if (const char* name = std::getenv("TORCHSPAN_TEST_SCENARIO")) {
      torchspan::bench::run_rank(name);
      return 0;
    }
    int rounds = torchspan::bench::rounds_or(5);
    bool peer = true;
    std::optional<torchspan::testing::LinkQuality> link;
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--no-peer") {
        peer = false;
      } else if (word == "--rounds" && i + 1 < argc) {
        rounds = std::stoi(argv[++i]);
      } else if (i + 1 < argc && torchspan::bench::read_link_option(word, argv[i + 1], link)) {
        ++i;
      } else {
        throw std::invalid_argument("pipeline: '" + word + "' is not an option: --rounds N, --no-peer, " +
                                    torchspan::bench::kSlowLinkOptions);
      }
    }
    if (link) {
      torchspan::bench::conduct_on_hosts(rounds, *link);
    } else {
      torchspan::bench::conduct(rounds, peer);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
