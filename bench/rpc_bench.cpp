// Section rpc: calls between processes of this host, compared with LibTorch's own RPC driven from C++ and with
// the machine's limits. Prints the section's JSON to stdout and a table to stderr.
//   --filter TEXT   only rows whose names contain TEXT
//   --rounds N      number of rounds (5)
//   --no-peer       do not run LibTorch's RPC
//   --longer N      N times as many calls in a round, for a profiler
// In every round, each measurement starts its processes and ends them before the next one starts, because the
// peer's idle processes keep cores busy.
#include <cstdio>
#include <fstream>
#include <set>
#include <string_view>
#include <unistd.h>

#include "bench/harness.h"
#include "bench/peers/torch_rpc.h"
#include "bench/rpc/report.h"
#include "bench/rpc/rows.h"
#include "bench/rpc/side.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

using testing::Process;
using testing::ProcessWorld;

struct Arguments {
  std::string filter = {};
  int rounds = rounds_or(5);
  bool peer = true;
  int longer = 1;
};

/// One measurement: the processes of one side, with one transport, in a world of one size.
struct Trial {
  std::string side;
  Way way = Way::kLocal;
  int size = 1;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool wanted(const std::string& name, const std::string& filter) {
  return name.find(filter) != std::string::npos;
}

std::string samples_file(const std::string& folder) { return folder + "/samples.json"; }

/// The part of a started process, from its environment variables.
struct Part {
  Trial trial;
  int rank = std::stoi(variable("RANK"));
  std::string folder = variable("TORCHSPAN_RUNTIME_DIR");
  std::string filter = variable("TORCHSPAN_BENCH_FILTER");
  pid_t worker = std::stoi(variable("TORCHSPAN_BENCH_WORKER"));
  int longer = std::stoi(variable("TORCHSPAN_BENCH_LONGER"));

  Part() {
    trial.side = variable("TORCHSPAN_TEST_SCENARIO");
    trial.way = static_cast<Way>(std::stoi(variable("TORCHSPAN_BENCH_WAY")));
    trial.size = std::stoi(variable("WORLD_SIZE"));
  }
};

std::unique_ptr<Side> join(const Part& part) {
  const WorkerPlace place{part.trial.way, part.rank, part.trial.size, part.folder};
  return part.trial.side == kPeer ? join_torch_rpc(place) : join_torchspan(place);
}

void call(const Part& part, Executor& executor) {
  Samples samples;
  const Meter meter(executor, part.worker, part.longer);
  const auto side = join(part);
  for (const Row& row : rpc_rows()) {
    if (row.way == part.trial.way && row.size == part.trial.size && wanted(row.name, part.filter))
      samples[row.name] = row.measure(*side, meter);
  }
  std::ofstream(samples_file(part.folder)) << nlohmann::json(samples);
  if (part.trial.side == kPeer) _exit(0);
  side->leave();
}

void serve(const Part& part, Executor& executor) {
  const auto side = join(part);
  if (part.trial.side == kPeer) executor.sleep(std::chrono::minutes(5));  // until it is killed
  side->leave();
}

void measure_limits(const Part& part, Executor& executor) {
  Samples samples;
  for (const Limit& limit : rpc_limits()) samples[limit.name] = limit.measure(Meter(executor));
  std::ofstream(samples_file(part.folder)) << nlohmann::json(samples);
}

void play(const Part& part) {
  const auto executor = make_executor();
  if (part.trial.side == kLimits) return measure_limits(part, *executor);
  part.rank == 0 ? call(part, *executor) : serve(part, *executor);
}

std::vector<Trial> trials(const Arguments& arguments) {
  std::set<std::pair<Way, int>> worlds;
  for (const Row& row : rpc_rows()) {
    if (wanted(row.name, arguments.filter)) worlds.emplace(row.way, row.size);
  }
  std::vector<Trial> list{{kLimits, Way::kLocal, 1}};
  for (const auto& [way, size] : worlds) {
    list.push_back({kOurs, way, size});
    if (arguments.peer) list.push_back({kPeer, way, size});
  }
  return list;
}

/// Runs one trial. Throws an exception with the output of its processes if there are no samples.
Samples run(const Trial& trial, const Arguments& arguments) {
  ProcessWorld world(trial.size);
  std::map<std::string, std::string> variables{
      {"TORCHSPAN_BENCH_PARENT", std::to_string(getpid())},
      {"TORCHSPAN_BENCH_FILTER", arguments.filter},
      {"TORCHSPAN_BENCH_WAY", std::to_string(static_cast<int>(trial.way))},
      {"TORCHSPAN_BENCH_WORKER", "0"},
      {"TORCHSPAN_BENCH_LONGER", std::to_string(arguments.longer)},
      {"TP_SOCKET_IFNAME", "lo"}};
  for (int rank = 1; rank < trial.size; ++rank) {
    const Process& worker = world.start(rank, trial.side, variables);
    if (rank == 1) variables["TORCHSPAN_BENCH_WORKER"] = std::to_string(worker.pid());
  }
  Process& caller = world.start(0, trial.side, variables);
  const bool ended = caller.wait(world.executor(), std::chrono::seconds(150));
  if (!ended || caller.exit_code() != 0) {
    std::string text = ended ? "" : "it did not end in time\n";
    for (std::size_t i = 0; i < world.size(); ++i) text += world.process(i).output();
    throw std::runtime_error(text);
  }
  if (trial.side == kOurs) {
    for (std::size_t i = 0; i + 1 < world.size(); ++i)
      world.process(i).wait(world.executor(), std::chrono::seconds(20));
  }
  std::ifstream file(samples_file(world.environment(0).at("TORCHSPAN_RUNTIME_DIR")));
  return nlohmann::json::parse(file).get<Samples>();
}

void conduct(const Arguments& arguments) {
  Report report;
  const auto list = trials(arguments);
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const Trial& trial : list) {
      std::fprintf(stderr, "\rround %d of %d: %-14s", round + 1, arguments.rounds, trial.side.c_str());
      try {
        report.add(trial.side, run(trial, arguments));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "\n%s, world of %d: no figures in this round: %s\n", trial.side.c_str(),
                     trial.size, error.what());
        if (trial.side == kOurs) throw;
      }
    }
  }
  const nlohmann::json metrics = report.metrics();
  std::fprintf(stderr, "\r%s", table_of(metrics).c_str());
  print_section(metrics);
}

Arguments read_arguments(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string_view name = values[i];
    if (name == "--no-peer") {
      arguments.peer = false;
    } else if (name == "--filter" && i + 1 < count) {
      arguments.filter = values[++i];
    } else if (name == "--rounds" && i + 1 < count) {
      arguments.rounds = std::max(1, std::stoi(values[++i]));
    } else if (name == "--longer" && i + 1 < count) {
      arguments.longer = std::max(1, std::stoi(values[++i]));
    } else {
      throw std::runtime_error("unknown argument '" + std::string(name) +
                               "'; there are --filter TEXT, --rounds N, --no-peer and --longer N");
    }
  }
  if (trials(arguments).size() == 1)
    throw std::runtime_error("no row's name contains '" + arguments.filter + "'");
  if (arguments.peer && !has_torch_rpc()) {
    std::fprintf(stderr, "no peer: this LibTorch was built without its RPC\n");
    arguments.peer = false;
  }
  return arguments;
}

}  // namespace
}  // namespace torchspan::bench

int main(int count, char** values) {
  try {
    if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) {
      torchspan::bench::end_with_parent();
      torchspan::bench::play({});
    } else {
      torchspan::bench::conduct(torchspan::bench::read_arguments(count, values));
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
