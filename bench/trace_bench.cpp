// Section trace: what recording costs. The durations of a thousand operations each, and what they consist of; and pairs
// of small calls and of training steps, in a traced world and in one that is not, in turns between the same two
// processes. Prints the section's JSON to stdout.
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>

#include <torchspan/data_parallel.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/session.h>

#include "bench/ddp/workloads.h"
#include "bench/harness.h"
#include "core/api/observation.h"
#include "tests/support/processes.h"

namespace torchspan::bench {
namespace {

constexpr int kOperations = 1000;

/// Repeats an operation whose duration alone could not be measured.
template <class F>
std::function<void()> thousand(F operation) {
  return [operation] {
    for (int i = 0; i < kOperations; ++i) operation(i);
  };
}

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
constexpr Function<add> kAdd{"add"};

using Samples = std::map<std::string, std::vector<double>>;

/// The same work in two worlds of the same processes, of which the second is traced.
class Pair {
 public:
  Pair() : off_(options(), FunctionTable().add(kAdd)), on_(traced_options(), FunctionTable().add(kAdd)) {}

  /// Runs `work(i, session)`, i = 0 or 1, `times` in each world, in turns whose order changes; adds the microseconds of
  /// each turn to the samples NAME/off and NAME/on.
  template <class F>
  void measure(const std::string& name, int rounds, int times, F work, Samples& samples) {
    for (int round = -1; round < rounds; ++round) {  // the first one warms up
      for (std::size_t turn = 0; turn < 2; ++turn) {
        const std::size_t side = (static_cast<std::size_t>(round) + turn) % 2;
        Session& session = side == 0 ? off_ : on_;
        const TimePoint began = session.runtime().executor.now();
        for (int i = 0; i < times; ++i) work(side, session);
        const auto took = session.runtime().executor.now() - began;
        if (round < 0) continue;
        samples[name + (side == 0 ? "/off" : "/on")].push_back(
            std::chrono::duration<double, std::micro>(took).count() / times);
      }
    }
  }
  std::array<Session*, 2> sessions() { return {&off_, &on_}; }

 private:
  static WorkerOptions options() {
    WorkerOptions options = WorkerOptions::from_env();
    options.observation = {};
    return options;
  }
  static WorkerOptions traced_options() {
    WorkerOptions traced = options();
    traced.environment.master_port =
        static_cast<std::uint16_t>(std::stoi(std::getenv("TORCHSPAN_BENCH_PORT")));
    traced.observation.trace_folder = std::getenv("TORCHSPAN_BENCH_TRACE");
    traced.observation.most_trace_spans = 20'000'000;  // all are written, in the last turn too
    return traced;
  }

  Session off_, on_;
};

void measure_calls(Pair& pair, Samples& samples) {
  constexpr int kTimes = 50'000;  // several ticks of the thread that writes the trace fall into each turn
  if (pair.sessions()[0]->rank() == 0) {
    pair.measure(
        "trace/small_call", rounds_or(15), kTimes,
        [](std::size_t, Session& session) { session.worker().rpc_sync(1, kAdd, 40, 2); }, samples);
  }
  for (Session* session : pair.sessions()) session->worker().barrier();
}

void measure_steps(Pair& pair, Samples& samples) {
  struct Training {
    Training(Session& session, const std::string& model)
        : workload(make_workload(model)),
          group(session.group()),
          wrapped(workload.net, group),
          optimizer(workload.net->parameters(), torch::optim::SGDOptions(0.01)) {}
    void step() {
      optimizer.zero_grad();
      at::mse_loss(wrapped.forward(workload.input), workload.target).backward();
      optimizer.step();
    }
    const Workload workload;
    const collective::Group group;
    DistributedDataParallel<std::shared_ptr<Net>> wrapped;
    torch::optim::SGD optimizer;
  };
  std::array<std::unique_ptr<Training>, 2> trainings;
  for (std::size_t side = 0; side < 2; ++side) {
    trainings[side] = std::make_unique<Training>(*pair.sessions()[side], "mlp");
  }
  pair.measure(
      "trace/ddp_step", rounds_or(15), 8, [&](std::size_t side, Session&) { trainings[side]->step(); },
      samples);
}

void play() {
  end_with_parent();
  at::set_num_threads(1);
  Pair pair;
  Samples samples;
  measure_calls(pair, samples);
  measure_steps(pair, samples);
  if (pair.sessions()[0]->rank() == 0) {
    std::ofstream(std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/samples.json")
        << nlohmann::json(samples);
  }
  for (Session* session : pair.sessions()) session->shutdown();
}

/// Appends NAME/off, NAME/on and the median of the pairs' ratios.
void add_pair(const Samples& samples, const std::string& name, nlohmann::json& metrics) {
  const std::vector<double>&off = samples.at(name + "/off"), &on = samples.at(name + "/on");
  std::vector<double> ratios;
  for (std::size_t i = 0; i < off.size(); ++i) ratios.push_back(on[i] / off[i]);
  for (const std::string& side : {name + "/off", name + "/on"}) {
    metrics.push_back({{"name", side}, {"unit", "us"}, {"value", percentile(samples.at(side), 0.5)}});
  }
  metrics.push_back({{"name", name + "/on_over_off"},
                     {"unit", "ratio"},
                     {"value", percentile(ratios, 0.5)},
                     {"ratio", percentile(ratios, 0.5)},
                     {"rounds", ratios}});
}

void measure_pairs(nlohmann::json& metrics) {
  testing::ProcessWorld world(2);
  const std::string folder = world.folder() + "/trace";
  const ReservedPort reserved = testing::reserve_port();
  const std::string port = std::to_string(reserved.number());
  for (int rank = 0; rank < 2; ++rank) {
    world.start(rank, "pairs",
                {{"TORCHSPAN_BENCH_PORT", port},
                 {"TORCHSPAN_BENCH_TRACE", folder},
                 {"TORCHSPAN_BENCH_PARENT", std::to_string(getpid())}});
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    testing::Process& process = world.process(rank);
    if (process.wait(world.executor(), std::chrono::minutes(5)) && process.exit_code() == 0) continue;
    std::fprintf(stderr, "trace: rank %zu failed:\n%s\n", rank, process.output().c_str());
    return;
  }
  std::ifstream file(world.folder() + "/samples.json");
  const auto samples = nlohmann::json::parse(file).get<Samples>();
  for (const char* name : {"trace/small_call", "trace/ddp_step"}) add_pair(samples, name, metrics);
}

void measure() {
  const auto executor = make_executor();
  const auto idle = std::make_shared<Runtime>(*executor, "idle");
  const auto traced = std::make_shared<Runtime>(*executor, "traced");
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("torchspan-bench-trace-" + std::to_string(getpid())))
          .string();
  nlohmann::json metrics;
  {
    const Observation observation(traced, {.trace_folder = folder, .most_trace_spans = 100'000},
                                  identify(*executor, "traced", 0, 1));
    Bench bench(*executor);
    const auto record = [&](Runtime& runtime) {
      return thousand([&runtime, &executor](int i) {
        runtime.spans.record(SpanKind::kCall, "Encoder.forward", executor->now(),
                             SpanLink{.id = static_cast<std::uint64_t>(i), .peer = 1, .bytes = 64});
      });
    };
    const auto scope = [&](Runtime& runtime) {
      return thousand([&runtime](int i) {
        const SpanScope span(runtime.spans, SpanKind::kUser, "augment", static_cast<std::uint64_t>(i));
      });
    };
    const std::string clocks = "trace/two_clock_reads/1000";
    bench.add(clocks, 20, thousand([&](int) {
                static_cast<void>(executor->now());
                static_cast<void>(executor->now());
              }));
    bench.add("trace/record/1000", 20, record(*idle), {.limit = clocks});
    bench.add("trace/scope/1000", 20, scope(*idle), {.limit = clocks});
    bench.add("trace/record/1000/traced", 20, record(*traced), {.limit = clocks});
    bench.add("trace/scope/1000/traced", 20, scope(*traced), {.limit = clocks});
    bench.run(30);
    metrics = bench.metrics();
  }
  std::filesystem::remove_all(folder);
  measure_pairs(metrics);
  print_section(metrics);
}

}  // namespace
}  // namespace torchspan::bench

int main() {
  if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) {
    torchspan::bench::play();
  } else {
    torchspan::bench::measure();
  }
}
