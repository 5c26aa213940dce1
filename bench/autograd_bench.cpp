// Section autograd: backward passes of one process against LibTorch's engine, and passes over several
// processes of this host, SMART and FAST, against PyTorch's distributed autograd (python3-torch). Prints the
// section's JSON to stdout and a table to stderr.
//   --rounds N      number of rounds (5)
//   --only WORLD    engine, pair, chain or trainers
//   --seconds S     time per figure and round (0.3; 0.1 in a quick run)
//   --no-peer       do not run PyTorch
// In every round, each measurement starts its processes and ends them before the next one starts, because the
// peer's idle processes keep cores busy. A missed goal is reported but is not an error.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string_view>

#include <ATen/core/ivalue.h>
#include <ATen/Parallel.h>

#include "bench/autograd/local.h"
#include "bench/autograd/report.h"
#include "bench/autograd/world.h"
#include "bench/harness.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using testing::Process;
using testing::ProcessWorld;

/// From the repository's root, where `make bench` runs.
constexpr const char* kScript = "bench/peers/torch_dist_autograd.py";
constexpr const char* kPython = "/usr/bin/python3";
constexpr const char* kEngine = "engine";

struct World {
  const char* name;
  int size;
};
constexpr World kWorlds[] = {{kEngine, 1}, {"pair", 2}, {"chain", 4}, {"trainers", kTrainers + kServers}};

struct Arguments {
  int rounds = rounds_or(5);
  std::string only = {};
  std::string seconds = is_quick() ? "0.1" : "0.3";
  bool peer = true;
};

std::string samples_file(const std::string& folder) { return folder + "/samples.json"; }

/// Runs the part of a process that conduct() started.
void play(const std::string& world) {
  const std::string folder = std::getenv("TORCHSPAN_RUNTIME_DIR");
  const Duration limit = std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::stod(std::getenv("TORCHSPAN_BENCH_SECONDS"))));
  at::set_num_threads(1);
  const Samples samples =
      world == kEngine ? measure_engine(*make_executor(), small_programs(), limit) : take_part(world, limit);
  if (std::string_view(std::getenv("RANK")) == "0")
    std::ofstream(samples_file(folder)) << nlohmann::json(samples);
}

/// Runs one world, of TorchSpan or of a peer. Throws an exception with the output of its processes if it
/// fails.
Samples run(const World& world, const std::string& peer, const Arguments& arguments) {
  ProcessWorld processes(world.size);
  const std::map<std::string, std::string> variables{{"TORCHSPAN_BENCH_PARENT", std::to_string(getpid())},
                                                     {"TORCHSPAN_BENCH_SECONDS", arguments.seconds},
                                                     {"TP_SOCKET_IFNAME", "lo"}};
  std::vector<std::string> through;
  if (!peer.empty())
    through = {kPython, kScript, world.name, arguments.seconds, peer == kPeers[0] ? "default" : "tcp"};
  for (int rank = 0; rank < world.size; ++rank) processes.start(rank, world.name, variables, through);
  // The peer's rank 0 exits without a shutdown, so the others are killed.
  bool good = true;
  for (int rank = 0; rank < (peer.empty() ? world.size : 1) && good; ++rank) {
    Process& process = processes.process(static_cast<std::size_t>(rank));
    good = process.wait(processes.executor(), std::chrono::seconds(120)) && process.exit_code() == 0;
  }
  if (!good) {
    std::string text;
    for (std::size_t i = 0; i < processes.size(); ++i) text += processes.process(i).output();
    throw std::runtime_error(text.empty() ? "it did not end in time" : text);
  }
  std::ifstream file(samples_file(processes.folder()));
  Samples samples = nlohmann::json::parse(file).get<Samples>();
  if (peer.empty()) return samples;
  Samples named;
  for (auto& [name, values] : samples) named[peer + "/" + name] = std::move(values);
  return named;
}

/// Returns false if a requested peer gave no figures.
bool conduct(const Arguments& arguments) {
  Report report;
  const bool peers = arguments.peer && std::filesystem::exists(kPython) && std::filesystem::exists(kScript);
  if (arguments.peer && !peers)
    std::fprintf(stderr, "autograd: skipping the peer: %s or %s is missing\n", kPython, kScript);
  bool complete = true;
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const World& world : kWorlds) {
      if (!arguments.only.empty() && arguments.only != world.name) continue;
      std::fprintf(stderr, "\rround %d of %d: %-10s", round + 1, arguments.rounds, world.name);
      report.add(round, run(world, "", arguments));
      if (!peers || world.size == 1) continue;
      for (const char* peer : kPeers) {
        try {
          report.add(round, run(world, peer, arguments));
        } catch (const std::exception& error) {
          complete = false;
          std::fprintf(stderr, "\n%s has no figures of '%s' in this round: %s\n", peer, world.name,
                       error.what());
        }
      }
    }
  }
  const nlohmann::json metrics = report.metrics();
  std::fprintf(stderr, "\r%s", table_of(metrics).c_str());
  print_section(metrics);
  return complete;
}

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = values[i];
    if (name == "--no-peer") {
      arguments.peer = false;
    } else if (name == "--rounds" && i + 1 < count) {
      arguments.rounds = std::max(1, std::stoi(values[++i]));
    } else if (name == "--seconds" && i + 1 < count) {
      arguments.seconds = std::to_string(std::stod(values[++i]));
    } else if (name == "--only" && i + 1 < count) {
      arguments.only = values[++i];
    } else {
      throw std::invalid_argument("autograd: unknown argument '" + std::string(name) +
                                  "'; there are --rounds N, --only WORLD, --seconds S and --no-peer");
    }
  }
  const bool known = std::any_of(std::begin(kWorlds), std::end(kWorlds),
                                 [&](const World& world) { return world.name == arguments.only; });
  if (!arguments.only.empty() && !known)
    throw std::invalid_argument("autograd: there is no world '" + arguments.only +
                                "'; there are engine, pair, chain and trainers");
  return arguments;
}

}  // namespace
}  // namespace torchspan::bench

int main(int count, char** values) {
  try {
    if (const char* world = std::getenv("TORCHSPAN_TEST_SCENARIO")) {
      torchspan::bench::end_with_parent();
      torchspan::bench::play(world);
    } else if (!torchspan::bench::conduct(torchspan::bench::parse(count, values))) {
      return 1;
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
