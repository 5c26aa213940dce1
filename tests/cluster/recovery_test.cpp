// Training in stages that goes on in the same processes after the death of a worker, across real processes under
// `torchspan run --max-replacements`: the survivors create the pipeline, or the remote modules, again with the
// successor, and restore the last checkpoint (docs/pipeline.md).
#include <fmt/format.h>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"

namespace torchspan::recovery_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

constexpr std::int64_t kSteps = 60;
constexpr std::int64_t kStepsPerCheckpoint = 7;
constexpr std::int64_t kWidth = 24;

std::string folder() { return std::getenv("TEST_FOLDER"); }

struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(std::uint64_t seed) {
    weight = register_parameter(
        "weight", at::randn({kWidth, kWidth}, at::detail::createCPUGenerator(seed), at::kDouble) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Dense);

at::Tensor input_of(std::int64_t step) {
  return at::randn({8, kWidth}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(step)),
                   at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// Notes that this process begins to train; `started` counts these lines.
void note_start(int rank) {
  std::ofstream(fmt::format("{}/starts{}", folder(), rank), std::ios::app) << getpid() << "\n";
}
void note_result(int rank, double sum) {
  std::ofstream(fmt::format("{}/sum{}", folder(), rank)) << fmt::format("{:.17g}", sum);
}

/// Kills this process after a random part of the steps, in its first life, if it is a victim.
void die_at_random(int rank, std::int64_t step) {
  const std::string death = std::getenv("TEST_DEATH");
  const std::string life = std::getenv("TORCHSPAN_REPLACEMENT_COUNT");
  const auto at = death.find(fmt::format("{}/{}:", rank, life));
  if (at == std::string::npos) return;
  if (step == std::stoll(death.substr(death.find(':', at) + 1))) ::kill(getpid(), SIGKILL);
}

/// The training of a pipeline, from its creation on.
class PipelineTraining {
 public:
  explicit PipelineTraining(Session& session)
      : session_(session),
        pipe_(session.worker(), layers(), {.balance = {1, 1, 1}, .micro_batches = 4}),
        optimizer_({optim::ParamGroup(pipe_.parameters(), optim::AdamW{.lr = 0.01},
                                      checkpoint::parameter_names(pipe_))}),
        manager_(session, {.directory = folder() + "/checkpoints"}) {
    manager_.add("pipe", pipe_);
    manager_.add("optimizer", optimizer_);
  }

  void run() {
    note_start(session_.rank());
    for (std::int64_t step = manager_.restore_or(0); step < kSteps; ++step) {
      die_at_random(session_.rank(), step);
      optimizer_.zero_grad();
      pipe_.train_step(input_of(step), input_of(step + 1000), mean_square);
      optimizer_.step();
      if ((step + 1) % kStepsPerCheckpoint == 0 || step + 1 == kSteps) manager_.save(step + 1);
    }
    manager_.wait();
    session_.worker().barrier();  // a death until here is handled as one during training
    double sum = 0;
    for (const at::Tensor& parameter : pipe_.parameters()) sum += parameter.detach().sum().item<double>();
    note_result(session_.rank(), sum);
  }

 private:
  static pipeline::Layers layers() {
    pipeline::Layers layers;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) layers.add<Dense>(seed);
    return layers;
  }

  Session& session_;
  pipeline::Pipeline pipe_;
  optim::Optimizer optimizer_;
  CheckpointManager manager_;
};

/// Calls `attempt` again after each death of a worker, until it returns; gives up after a minute without a success of
/// `attempt` or a step.
void survive_deaths(Session& session, const std::function<void()>& attempt) {
  const Deadline end = session.runtime().executor.deadline_in(seconds(60));
  for (;;) {
    try {
      return attempt();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDisconnected || end.passed(session.runtime().executor.now())) throw;
      std::fprintf(stderr, "again: %s\n", error.what());
      session.runtime().executor.sleep(milliseconds(50));
    }
  }
}

void train_pipeline() {
  Session session(WorkerOptions::from_env());
  survive_deaths(session, [&] { PipelineTraining(session).run(); });
  session.shutdown(seconds(30));
}

constexpr ModuleClass<Dense, std::uint64_t> kDense{"dense"};

std::int64_t pid() { return getpid(); }
constexpr Function<pid> kPid{"pid"};

/// Kills the workers that TEST_DEATH ("RANK/0:STEP;…") names, each once.
class Victims {
 public:
  void strike(Worker& worker, std::int64_t step) {
    std::istringstream deaths(std::getenv("TEST_DEATH"));
    for (std::string death; std::getline(deaths, death, ';');) {
      if (step != std::stoll(death.substr(4)) || !struck_.insert(death).second) continue;
      ::kill(static_cast<pid_t>(worker.rpc_sync(death[0] - '0', kPid)), SIGKILL);
    }
  }

 private:
  std::set<std::string> struck_;
};

/// Trains modules on workers 1 and 2 from worker 0.
void train_remote_modules(Session& session, Victims& victims) {
  Worker& worker = session.worker();
  RemoteModule<Dense, std::uint64_t> first(worker, 1, kDense, 1), second(worker, 2, kDense, 2);
  optim::DistributedOptimizer optimizer(session, optim::SGD{.lr = 0.05, .momentum = 0.9}, {first, second});
  CheckpointManager manager(session,
                            {.directory = folder() + "/checkpoints", .participants = {worker.name()}});
  manager.add("first", first);
  manager.add("second", second);
  manager.add("optimizer", optimizer);
  note_start(0);
  for (std::int64_t step = manager.restore_or(0); step < kSteps; ++step) {
    victims.strike(worker, step);
    autograd::Context context(session);
    const at::Tensor loss = mean_square(second.forward(first.forward(input_of(step))), input_of(step + 1000));
    context.backward(loss);
    optimizer.step(context);
    if ((step + 1) % kStepsPerCheckpoint == 0 || step + 1 == kSteps) manager.save(step + 1);
  }
  manager.wait();
  const auto sum = second.forward(first.forward(input_of(0))).sum().item<double>();
  for (const char* name : {"worker1", "worker2"}) worker.barrier({"worker0", name});
  note_result(0, sum);
}

/// Serves its module until worker 0 has finished, whoever dies meanwhile.
void serve_modules(Session& session) {
  Worker& worker = session.worker();
  note_start(session.rank());
  worker.barrier({"worker0", worker.name()});
}

void train_remotely() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kDense).add(kPid));
  Victims victims;
  survive_deaths(session, [&] {
    if (session.rank() == 0) return train_remote_modules(session, victims);
    serve_modules(session);
  });
  session.shutdown(seconds(30));
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Recovery : public ::testing::Test {
 protected:
  struct Outcome {
    std::string sums;
    std::vector<std::vector<std::string>> starts;  ///< process ids, by rank
  };

  static std::string sums_in(const std::string& folder) {
    std::string sums;
    for (int rank = 0; rank < 3; ++rank) sums += text_of(fmt::format("{}/sum{}", folder, rank)) + " ";
    return sums;
  }
  /// The results of a run without a death, which therefore needs no launcher.
  static std::string undisturbed(const std::string& scenario) {
    const testing::TemporaryFolder place;
    testing::ProcessWorld world(3);
    for (int rank = 0; rank < 3; ++rank) {
      world.start(rank, scenario,
                  {{"TEST_FOLDER", place.path()}, {"TEST_DEATH", ""}, {"TORCHSPAN_REPLACEMENT_COUNT", "0"}});
    }
    testing::expect_all_end_well(world);
    return sums_in(place.path());
  }
  Outcome run(const std::string& scenario, const std::string& death) {
    const testing::TemporaryFolder place;
    testing::Process launcher(testing::launched({"-n", "3", "--max-replacements", "9", "--restart-backoff",
                                                 "10ms", "--give-up-after", "0"}),
                              {{"TORCHSPAN_TEST_SCENARIO", scenario},
                               {"TEST_FOLDER", place.path()},
                               {"TEST_DEATH", death},
                               {"OMP_NUM_THREADS", "1"}},
                              place.path() + "/output");
    EXPECT_TRUE(launcher.wait(*executor_, seconds(120)));
    EXPECT_EQ(launcher.exit_code(), 0) << death << "\n" << launcher.output();
    Outcome outcome;
    outcome.sums = sums_in(place.path());
    for (int rank = 0; rank < 3; ++rank) {
      std::istringstream lines(text_of(fmt::format("{}/starts{}", place.path(), rank)));
      outcome.starts.emplace_back();
      for (std::string line; std::getline(lines, line);) outcome.starts.back().push_back(line);
    }
    return outcome;
  }
  const std::unique_ptr<Executor> executor_ = make_executor();
};

TEST_F(Recovery, OfAPipelineGoesOnInTheSameProcessesWithTheSameResult) {
  const std::string expected = undisturbed("recovery.train_pipeline");
  EXPECT_GT(expected.size(), 10u);
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  // One death, and then two at nearly the same time, one of them of a worker that has died before.
  const auto first = 1 + random() % (kSteps - 3), second = first + 1 + random() % (kSteps - 2 - first);
  const std::string death = fmt::format("2/0:{0};1/0:{1};2/1:{1}", first, second);
  const Outcome outcome = run("recovery.train_pipeline", death);
  EXPECT_EQ(outcome.sums, expected) << death;
  EXPECT_EQ(std::set(outcome.starts[0].begin(), outcome.starts[0].end()).size(), 1u) << "rank 0 has stayed";
  EXPECT_GE(outcome.starts[0].size(), 3u) << "and has trained again";
}

TEST_F(Recovery, OfRemoteModulesGoesOnInTheSameProcessesWithTheSameResult) {
  const std::string expected = undisturbed("recovery.train_remotely");
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  // Either worker dies, at another moment.
  const auto first = random() % (kSteps - 1), second = first + 1 + random() % (kSteps - 1 - first);
  const std::string death = fmt::format("1/0:{};2/0:{}", first, second);
  const Outcome outcome = run("recovery.train_remotely", death);
  EXPECT_EQ(outcome.sums, expected) << death;
  EXPECT_EQ(std::set(outcome.starts[0].begin(), outcome.starts[0].end()).size(), 1u) << "rank 0 has stayed";
  EXPECT_GE(outcome.starts[0].size(), 3u) << "and has trained again";
}

const testing::Scenarios kScenarios("recovery",
                                    {{"train_pipeline", train_pipeline}, {"train_remotely", train_remotely}});

}  // namespace
}  // namespace torchspan::recovery_test
