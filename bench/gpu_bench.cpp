// Section gpu: a backward pass and a data-parallel step on one GPU against LibTorch alone, and calls with tensors on the
// GPU between two processes that share it, against LibTorch's own RPC and a copy on the device. Prints the section's
// JSON to stdout and a table to stderr.
//   --device D      cuda (the default) or cpu, to try the program without a GPU
//   --rounds N      number of rounds (5)
//   --only PART     engine, ddp or calls
//   --no-peer       do not run LibTorch's RPC
// In every round, each measurement starts its processes and ends them before the next one starts.
#include <cstdio>
#include <fstream>
#include <string_view>

#include <ATen/ATen.h>

#include <torchspan/detail/device/streams.h>

#include "bench/autograd/local.h"
#include "bench/gpu/data_parallel.h"
#include "bench/harness.h"
#include "bench/peers/torch_rpc.h"
#include "bench/rpc/meter.h"
#include "bench/rpc/side.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using testing::Process;
using testing::ProcessWorld;

constexpr const char* kOurs = "torchspan";
constexpr const char* kPeer = "torch-rpc-cpp";
/// Bytes. The larger one does not fit into the memory that processes share by default.
constexpr std::int64_t kBulk = 64 << 20, kLarger = 256 << 20;

struct Arguments {
  std::string device = "cuda";
  int rounds = rounds_or(5);
  std::string only = {};
  bool peer = true;
};

/// What a figure is compared with, and the ratio that is the goal.
struct Goal {
  const char* figure;
  const char* against;
  double most;
};
constexpr Goal kGoals[] = {
    {"engine/transformer_launch_bound", "engine/transformer_launch_bound/libtorch", 1.02},
    {"engine/transformer_compute_bound", "engine/transformer_compute_bound/libtorch", 1.02},
    {"ddp_step/resnet50", "ddp_step/resnet50/plain", 1.02},
    {"calls/add_64B", "torch-rpc-cpp/calls/add_64B", 0.3},
    {"calls/one_way/64MiB", "limit/device_copy/64MiB", 1.2},
    {"calls/one_way/64MiB", "torch-rpc-cpp/calls/one_way/64MiB", 1.0},
    {"calls/one_way/256MiB", "torch-rpc-cpp/calls/one_way/256MiB", 1.0}};

std::string samples_file(const std::string& folder) { return folder + "/samples.json"; }

c10::Device device_of(const std::string& name) {
  return name == "cpu" ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, 0);
}

/// Waits until the device has done what this thread gave it.
std::function<void()> finish_of(c10::Device device) {
  if (device.is_cpu()) return [] {};
  return [device] { device::current_stream(device).synchronize(); };
}

Samples measure_engine_on(Executor& executor, c10::Device device, Duration limit) {
  std::vector<Program> programs{transformer_program("transformer_launch_bound", 4, 32, 64, device)};
  programs.push_back(device.is_cpu()
                         ? transformer_program("transformer_compute_bound", 4, 64, 128, device)
                         : transformer_program("transformer_compute_bound", 16, 512, 2048, device));
  return measure_engine(executor, programs, limit, finish_of(device));
}

Samples measure_calls(Executor& executor, const WorkerPlace& place, const std::string& side_name) {
  const auto side = side_name == kPeer ? join_torch_rpc(place) : join_torchspan(place);
  if (place.rank != 0) {
    if (side_name == kPeer) executor.sleep(std::chrono::minutes(5));  // until it is killed
    side->leave();
    return {};
  }
  const Meter meter(executor);
  const std::string prefix = side_name == kPeer ? std::string(kPeer) + "/" : "";
  Samples samples;
  const at::Tensor small = at::ones({16}).to(place.device), bulk = at::rand({kBulk / 4}).to(place.device);
  samples[prefix + "calls/add_64B"] = meter.times(1000, [&] { side->add(small); });
  samples[prefix + "calls/one_way/64MiB"] = meter.times(100, [&] { side->one_way(bulk); });
  const at::Tensor larger = at::rand({kLarger / 4}).to(place.device);
  samples[prefix + "calls/one_way/256MiB"] = meter.times(20, [&] { side->one_way(larger); });
  if (side_name == kOurs) {
    at::Tensor copy = at::empty_like(bulk);
    const auto finish = finish_of(place.device);
    samples["limit/device_copy/64MiB"] = meter.times(100, [&] {
      copy.copy_(bulk);
      finish();
    });
    side->leave();
  }
  return samples;
}

/// Runs the part of a process that run() started.
void play(const std::string& part) {
  const std::string folder = std::getenv("TORCHSPAN_RUNTIME_DIR");
  const int rank = std::atoi(std::getenv("RANK"));
  const c10::Device device = device_of(std::getenv("TORCHSPAN_BENCH_DEVICE"));
  const auto executor = make_executor();
  constexpr Duration kLimit = std::chrono::seconds(3);
  Samples samples;
  if (part == "engine") {
    samples = measure_engine_on(*executor, device, kLimit);
  } else if (part == "ddp") {
    samples = measure_data_parallel(*executor, device, kLimit, finish_of(device));
  } else {
    samples = measure_calls(*executor, {Way::kLocal, rank, 2, folder, device}, part);
  }
  if (rank == 0) std::ofstream(samples_file(folder)) << nlohmann::json(samples);
  if (part == kPeer) _exit(0);
}

/// Runs one part. Throws an exception with the output of its processes if it fails.
Samples run(const std::string& part, int size, const Arguments& arguments) {
  ProcessWorld world(size);
  for (int rank = size - 1; rank >= 0; --rank) {
    world.start(rank, part,
                {{"TORCHSPAN_BENCH_PARENT", std::to_string(getpid())},
                 {"TORCHSPAN_BENCH_DEVICE", arguments.device},
                 {"TP_SOCKET_IFNAME", "lo"}});
  }
  Process& caller = world.process(static_cast<std::size_t>(size - 1));
  const bool ended = caller.wait(world.executor(), std::chrono::seconds(150));
  if (!ended || caller.exit_code() != 0) {
    std::string text = ended ? "" : "it did not end in time\n";
    for (std::size_t i = 0; i < world.size(); ++i) text += world.process(i).output();
    throw std::runtime_error(part + " has no figures: " + text);
  }
  if (part == kOurs) world.process(0).wait(world.executor(), std::chrono::seconds(20));
  std::ifstream file(samples_file(world.folder()));
  return nlohmann::json::parse(file).get<Samples>();
}

using Rounds = std::map<std::string, std::vector<double>>;  ///< medians by figure

nlohmann::json metrics_of(const Rounds& rounds, const std::string& device) {
  nlohmann::json list = nlohmann::json::array();
  for (const Goal& goal : kGoals) {
    const auto ours = rounds.find(goal.figure), theirs = rounds.find(goal.against);
    if (ours == rounds.end()) continue;  // --only
    if (theirs == rounds.end()) {
      std::fprintf(stderr, "%-38s not measured against %s\n", goal.figure, goal.against);
      continue;
    }
    std::vector<double> ratios;
    for (std::size_t i = 0; i < std::min(ours->second.size(), theirs->second.size()); ++i)
      ratios.push_back(ours->second[i] / theirs->second[i]);
    const double value = percentile(ours->second, 0.5), ratio = percentile(ratios, 0.5);
    std::fprintf(stderr, "%-38s %12.1f us   %5.2f of %s (goal %.2f%s)\n", goal.figure, value, ratio,
                 goal.against, goal.most, ratio <= goal.most ? "" : ": missed");
    list.push_back({{"name", "gpu/" + std::string(goal.figure)},
                    {"unit", "us"},
                    {"device", device},
                    {"value", value},
                    {"peer", goal.against},
                    {"peer_value", percentile(theirs->second, 0.5)},
                    {"ratio", ratio},
                    {"goal", goal.most}});
  }
  return list;
}

void conduct(const Arguments& arguments) {
  if (arguments.device != "cpu" && !device::has_streams())
    throw std::runtime_error(
        "gpu: this machine has no GPU that LibTorch can use; --device cpu tries the program without");
  struct Part {
    std::string group, name;
    int size;
  };
  std::vector<Part> parts{{"engine", "engine", 1}, {"ddp", "ddp", 1}, {"calls", kOurs, 2}};
  if (arguments.peer && has_torch_rpc()) parts.push_back({"calls", kPeer, 2});
  Rounds rounds;
  bool peer_failed = false;
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const Part& part : parts) {
      if (!arguments.only.empty() && part.group != arguments.only) continue;
      std::fprintf(stderr, "round %d of %d: %s\n", round + 1, arguments.rounds, part.name.c_str());
      try {
        for (const auto& [name, values] : run(part.name, part.size, arguments))
          rounds[name].push_back(percentile(values, 0.5));
      } catch (const std::exception& error) {
        if (part.name != kPeer) throw;
        std::fprintf(stderr, "%s\n", error.what());
        peer_failed = true;
      }
    }
  }
  print_section(metrics_of(rounds, arguments.device));
  if (peer_failed)
    throw std::runtime_error(
        "gpu: LibTorch's RPC failed (see above), so figures against it are missing or of fewer rounds; "
        "--no-peer measures without it");
}

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = values[i];
    if (name == "--no-peer") {
      arguments.peer = false;
    } else if (name == "--rounds" && i + 1 < count) {
      arguments.rounds = std::max(1, std::stoi(values[++i]));
    } else if (name == "--device" && i + 1 < count) {
      arguments.device = values[++i];
    } else if (name == "--only" && i + 1 < count) {
      arguments.only = values[++i];
    } else {
      throw std::invalid_argument("gpu: unknown argument '" + std::string(name) +
                                  "'; there are --device D, --rounds N, --only PART and --no-peer");
    }
  }
  if (arguments.device != "cpu" && arguments.device != "cuda")
    throw std::invalid_argument("gpu: there is no device '" + arguments.device + "'; there are cuda and cpu");
  const auto& only = arguments.only;
  if (!only.empty() && only != "engine" && only != "ddp" && only != "calls")
    throw std::invalid_argument("gpu: there is no part '" + only + "'; there are engine, ddp and calls");
  return arguments;
}

}  // namespace
}  // namespace torchspan::bench

int main(int count, char** values) {
  try {
    if (const char* part = std::getenv("TORCHSPAN_TEST_SCENARIO")) {
      torchspan::bench::end_with_parent();
      torchspan::bench::play(part);
    } else {
      torchspan::bench::conduct(torchspan::bench::parse(count, values));
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
