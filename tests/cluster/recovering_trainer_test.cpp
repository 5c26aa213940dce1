// RecoveringTrainer across real processes under `torchspan run --max-replacements`: workers of a pipeline and of remote
// modules are killed or stopped in a step, while their state is copied, saved or restored, and while the objects are
// created again. The final parameters are those of a training without deaths and stops, bit for bit.
#include <csignal>
#include <filesystem>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"
#include "tests/support/environment.h"

namespace torchspan::recovering_trainer_test {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;
using testing::require;

constexpr int kRanks = 4;
constexpr std::int64_t kSteps = 60;
constexpr std::int64_t kWidth = 160;  // of a state that takes a while to send

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}
std::string path_of(const std::string& name) { return variable("TEST_FOLDER") + "/" + name; }

/// Kills this process where TEST_DEATHS says: "1/0:step@20;2/0:load@0" kills rank 1 in its first process in step 20, and
/// rank 2 in its first process when it restores its state. TEST_STOPS names places where the process stops, once.
void die_if_asked(int rank, const std::string& where, std::int64_t number) {
  const std::string life = variable("TORCHSPAN_REPLACEMENT_COUNT");
  const std::string mine = fmt::format("{}/{}:{}@{};", rank, life, where, number);
  if ((variable("TEST_DEATHS") + ";").find(mine) != std::string::npos) ::kill(getpid(), SIGKILL);
  const std::string mark = path_of(fmt::format("stopped{}", rank));
  if ((variable("TEST_STOPS") + ";").find(mine) == std::string::npos || std::filesystem::exists(mark)) return;
  std::ofstream(mark) << getpid();
  ::raise(SIGSTOP);
}

/// A part of the state whose process dies while it is copied or restored.
struct Trap {
  int rank;
  std::int64_t number = 0, loads = 0;
  optim::StateDict state_dict() const {
    die_if_asked(rank, "copy", number);
    optim::StateDict state;
    state.insert("number", torch::tensor(number));
    return state;
  }
  void load_state_dict(const optim::StateDict& state) {
    die_if_asked(rank, "load", loads++);
    number = state["number"].item<std::int64_t>();
  }
};

struct WideImpl : torch::nn::Module {
  explicit WideImpl(std::uint64_t seed) {
    weight = register_parameter(
        "weight", at::randn({kWidth, kWidth}, at::detail::createCPUGenerator(seed), at::kDouble) * 0.08);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::matmul(x, weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Wide);

at::Tensor input_of(std::int64_t step) {
  return at::randn({8, kWidth}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(step)),
                   at::kDouble);
}
at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

RecoveryOptions recovery_options() {
  RecoveryOptions options;
  options.checkpoint.directory = path_of("checkpoints");
  options.checkpoint.timeout = seconds(std::stoll(variable("TEST_TIMEOUT")));
  options.steps_per_checkpoint = std::stoll(variable("TEST_SAVE"));
  options.steps_per_copy = std::stoll(variable("TEST_COPY"));
  options.replacement_limit = seconds(std::stoll(variable("TEST_LIMIT")));
  return options;
}

void note_result(Session& session, const RecoveringTrainer& trainer, double sum) {
  std::ofstream(path_of(fmt::format("sum{}", session.rank()))) << fmt::format("{:.17g}", sum);
  std::ofstream(path_of(fmt::format("report{}", session.rank())))
      << trainer.report().rebuilds << " " << trainer.report().from_copies << " "
      << trainer.report().from_checkpoints;
}

/// What all attempts of a process share.
struct Totals {
  double sum = 0;
  std::int64_t attempts = 0;
};

/// One attempt to train a pipeline.
class PipelineObjects {
 public:
  PipelineObjects(Session& session, RecoveryState& state, Totals& totals)
      : session_(session),
        pipe_(session.worker(), layers(), {.balance = {2, 2, 2, 2}, .micro_batches = 4, .seed = 3}),
        optimizer_({optim::ParamGroup(pipe_.parameters(), optim::AdamW{.lr = 0.01},
                                      checkpoint::parameter_names(pipe_))}),
        trap_{session.rank()},
        totals_(totals) {
    state.add("pipe", pipe_);
    state.add("optimizer", optimizer_);
    state.add_per_rank("trap", trap_);
    die_if_asked(session.rank(), "build", totals.attempts++);
  }

  void step(std::int64_t number) {
    // The copy of the last step is still being sent.
    if (number % 4 == 0) session_.runtime().executor.sleep(microseconds(number * 50));
    die_if_asked(session_.rank(), "step", number);
    require(number == trap_.number, "steps are done in order");
    optimizer_.zero_grad();
    pipe_.train_step(input_of(number), input_of(number + 1000), mean_square);
    optimizer_.step();
    trap_.number = number + 1;
    totals_.sum = 0;
    for (const at::Tensor& parameter : pipe_.parameters())
      totals_.sum += parameter.detach().sum().item<double>();
  }

 private:
  static pipeline::Layers layers() {
    pipeline::Layers layers;
    for (std::uint64_t seed = 1; seed <= kRanks; ++seed) {
      layers.add<Wide>(seed);
      layers.add_function("dropout", [](const at::Tensor& x) { return at::dropout(x, 0.1, true); });
    }
    return layers;
  }

  Session& session_;
  pipeline::Pipeline pipe_;
  optim::Optimizer optimizer_;
  Trap trap_;
  Totals& totals_;
};

void train_pipeline() {
  Session session(WorkerOptions::from_env());
  Totals totals;
  RecoveringTrainer trainer(session, recovery_options());
  trainer.run(kSteps, [&](RecoveryState& state) {
    return std::make_unique<PipelineObjects>(session, state, totals);
  });
  note_result(session, trainer, totals.sum);
  session.shutdown(seconds(30));
}

constexpr ModuleClass<Wide, std::uint64_t> kWide{"wide"};

/// One attempt to train modules on workers 1 and 2 from worker 0.
class RemoteObjects {
 public:
  RemoteObjects(Session& session, RecoveryState& state, double& sum)
      : session_(session),
        first_(session.worker(), 1, kWide, 1),
        second_(session.worker(), 2, kWide, 2),
        optimizer_(session, optim::SGD{.lr = 0.05, .momentum = 0.9}, {first_, second_}),
        sum_(sum) {
    state.add("first", first_);
    state.add("second", second_);
    state.add("optimizer", optimizer_);
  }

  void step(std::int64_t number) {
    autograd::Context context(session_);
    const at::Tensor loss =
        mean_square(second_.forward(first_.forward(input_of(number))), input_of(number + 1000));
    context.backward(loss);
    optimizer_.step(context);
    sum_ = second_.forward(first_.forward(input_of(0))).sum().item<double>();
  }

 private:
  Session& session_;
  RemoteModule<Wide, std::uint64_t> first_, second_;
  optim::DistributedOptimizer optimizer_;
  double& sum_;
};

/// A rank that only serves its modules.
struct Server {
  int rank;
  /// It is ahead of worker 0, and waits for it when it saves.
  void step(std::int64_t number) const { die_if_asked(rank, "step", number); }
};

void train_remotely() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kWide));
  double sum = 0;
  RecoveringTrainer trainer(session, recovery_options());
  if (session.rank() == 0) {
    trainer.run(kSteps,
                [&](RecoveryState& state) { return std::make_unique<RemoteObjects>(session, state, sum); });
  } else {
    trainer.run(kSteps, [&](RecoveryState&) { return std::make_unique<Server>(Server{session.rank()}); });
  }
  note_result(session, trainer, sum);
  session.shutdown(seconds(30));
}

/// The program fails on one rank, where no rank has died.
void fail() {
  Session session(WorkerOptions::from_env());
  struct Failing {
    int rank;
    void step(std::int64_t number) const {
      if (rank == 1 && number == 5) throw std::runtime_error("the program of this rank failed");
    }
  };
  RecoveringTrainer trainer(session, recovery_options());
  trainer.run(kSteps, [&](RecoveryState&) { return std::make_unique<Failing>(Failing{session.rank()}); });
}

/// A step needs a worker that has left the world and does not belong to the training.
void lose() {
  Session session(WorkerOptions::from_env());
  struct Losing {
    void step(std::int64_t number) const {
      if (number == 5) throw Error(ErrorKind::kDisconnected, "worker 'table' has left");
    }
  };
  RecoveringTrainer trainer(session, recovery_options());
  trainer.run(kSteps, [&](RecoveryState&) { return std::make_unique<Losing>(); });
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Processes that stop one after the other, each of another rank, and the signal that each gets when the others have
/// noticed.
struct Stop {
  std::vector<std::string> where = {};
  int signal = SIGCONT;
  int timeout = 60;  ///< s; limit of each wait for a late rank
  int limit = 60;    ///< s; of the wait for a replacement
};

class Recovering : public ::testing::Test {
 protected:
  struct Outcome {
    std::string sums;
    std::vector<RecoveryReport> reports;  ///< of the last process of each rank
    std::string output;
    int exit_code = 0;
  };
  struct Intervals {
    int save = 7, copy = 0;
  };

  static std::string sums_in(const std::string& folder) {
    std::string sums;
    for (int rank = 0; rank < kRanks; ++rank) sums += text_of(fmt::format("{}/sum{}", folder, rank)) + " ";
    return sums;
  }
  /// The results of a run in which no process dies or stops, and which therefore needs no launcher.
  static std::string undisturbed(const std::string& scenario) {
    const testing::TemporaryFolder place;
    testing::ProcessWorld world(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      world.start(rank, scenario,
                  {{"TEST_FOLDER", place.path()},
                   {"TEST_DEATHS", ""},
                   {"TEST_SAVE", "7"},
                   {"TEST_COPY", "0"},
                   {"TEST_STOPS", ""},
                   {"TEST_TIMEOUT", "0"},  // no limit
                   {"TEST_LIMIT", "60"}});
    }
    testing::expect_all_end_well(world);
    return sums_in(place.path());
  }
  Outcome run(const std::string& scenario, const std::string& deaths, Intervals intervals,
              int replacements = 9, const Stop& stop = {}) {
    const testing::TemporaryFolder place;
    testing::Process launcher(
        testing::launched({"-n", std::to_string(kRanks), "--max-replacements", std::to_string(replacements),
                           "--restart-backoff", "10ms", "--give-up-after", "0"}),
        {{"TORCHSPAN_TEST_SCENARIO", scenario},
         {"TEST_FOLDER", place.path()},
         {"TEST_DEATHS", deaths},
         {"TEST_SAVE", std::to_string(intervals.save)},
         {"TEST_COPY", std::to_string(intervals.copy)},
         {"TEST_STOPS", fmt::format("{}", fmt::join(stop.where, ";"))},
         {"TEST_TIMEOUT", std::to_string(stop.timeout)},
         {"TEST_LIMIT", std::to_string(stop.limit)},
         {"TORCHSPAN_STOPPED_LIMIT", "1"},
         {"OMP_NUM_THREADS", "1"}},
        place.path() + "/output");
    if (stop.signal != 0) {
      for (const std::string& where : stop.where)
        send_when_noticed(launcher, fmt::format("{}/stopped{}", place.path(), where[0]), stop.signal);
    }
    EXPECT_TRUE(launcher.wait(*executor_, seconds(120))) << deaths << "\n" << launcher.output();
    Outcome outcome;
    outcome.exit_code = launcher.exit_code();
    outcome.output = launcher.output();
    outcome.sums = sums_in(place.path());
    for (int rank = 0; rank < kRanks; ++rank) {
      std::istringstream numbers(text_of(fmt::format("{}/report{}", place.path(), rank)));
      RecoveryReport& report = outcome.reports.emplace_back();
      numbers >> report.rebuilds >> report.from_copies >> report.from_checkpoints;
    }
    return outcome;
  }
  /// Sends a signal to the process that has left its number in `mark`, once the trainer of another one has said that it
  /// waits for it.
  void send_when_noticed(testing::Process& launcher, const std::string& mark, int signal) {
    const Deadline deadline = executor_->deadline_in(seconds(60));
    const auto noticed = [&] {
      const std::string process = text_of(mark);
      return !process.empty() &&
             launcher.output().find(
                 fmt::format("training waits: 'worker{0}' (rank {0}, process {1}) is stopped by a signal",
                             mark.back(), process)) != std::string::npos;
    };
    while (!noticed() && !deadline.passed(executor_->now())) executor_->sleep(microseconds(20000));
    ASSERT_TRUE(noticed()) << launcher.output();
    ::kill(std::stoi(text_of(mark)), signal);
  }
  Outcome survive(const std::string& scenario, const std::string& deaths, Intervals intervals,
                  const Stop& stop = {}) {
    Outcome outcome = run(scenario, deaths, intervals, 9, stop);
    EXPECT_EQ(outcome.exit_code, 0) << deaths << "\n" << outcome.output;
    return outcome;
  }
  const std::unique_ptr<Executor> executor_ = make_executor();
};

TEST_F(Recovering, PipelinesGoOnFromMemoryAfterDeathsAtEveryMoment) {
  const std::string expected = undisturbed("recovering_trainer.train_pipeline");
  ASSERT_GT(expected.size(), 30u);
  const auto seed = testing::number_from("TORCHSPAN_SEED", std::uint64_t{1});
  SCOPED_TRACE("TORCHSPAN_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto step = [&] { return 5 + random() % (kSteps - 6); };
  // Never two neighbors at once, which have the only copies of a part.
  struct Case {
    std::string deaths;
    int recoveries;  ///< at least
  };
  const std::vector<Case> cases{
      // While copies are sent (every fourth step), and while objects are created again; while the state is copied; once
      // more in one rank.
      {"3/0:step@16;1/0:build@1;2/0:copy@24;1/1:step@44", 3},
      // In a step, and while the state is restored.
      {fmt::format("1/0:step@{};3/0:load@0", step()), 1}};
  for (const auto& [deaths, recoveries] : cases) {
    const Outcome outcome = survive("recovering_trainer.train_pipeline", deaths, {.save = 1000, .copy = 4});
    EXPECT_EQ(outcome.sums, expected) << deaths << "\n" << outcome.output;
    EXPECT_GE(outcome.reports[0].rebuilds, recoveries) << deaths;
    EXPECT_GE(outcome.reports[0].from_copies, recoveries) << deaths << "\n" << outcome.output;
  }
}

TEST_F(Recovering, PipelinesGoOnFromTheNewestCheckpointWithoutCopiesOrIfTheyAreLost) {
  const std::string expected = undisturbed("recovering_trainer.train_pipeline");
  // Before the first checkpoint of a step, so from the initial state; while the state is saved; in a step.
  Outcome outcome =
      survive("recovering_trainer.train_pipeline", "3/0:step@2;2/0:copy@21;1/0:step@40", {.save = 7});
  EXPECT_EQ(outcome.sums, expected) << outcome.output;
  EXPECT_EQ(outcome.reports[0].from_copies, 0);
  EXPECT_GE(outcome.reports[0].rebuilds, 3) << outcome.output;
  EXPECT_GE(outcome.reports[0].from_checkpoints, 2) << outcome.output;
  // Neighbors at nearly the same time.
  outcome = survive("recovering_trainer.train_pipeline", "1/0:step@33;2/0:step@33", {.save = 7, .copy = 4});
  EXPECT_EQ(outcome.sums, expected) << outcome.output;
  EXPECT_GE(outcome.reports[0].rebuilds, 1);
}

TEST_F(Recovering, RemoteModulesGoOnFromTheNewestCheckpoint) {
  const std::string expected = undisturbed("recovering_trainer.train_remotely");
  const Outcome outcome =
      survive("recovering_trainer.train_remotely", "1/0:step@14;2/0:step@35", {.save = 7});
  EXPECT_EQ(outcome.sums, expected) << outcome.output;
  EXPECT_GE(outcome.reports[0].rebuilds, 2);
}

TEST_F(Recovering, PipelinesWaitForAStoppedProcessAndGoOnWithIt) {
  const std::string expected = undisturbed("recovering_trainer.train_pipeline");
  struct Case {
    std::string deaths;
    Stop stop;
    Intervals intervals;
    int rebuilds;  ///< at most
  };
  const std::vector<Case> cases{
      // While the state comes back after a death; in a step; rank 0, which has the store.
      {"1/0:step@10",
       {.where = {"3/0:load@0", "1/1:step@20", "0/0:step@40"}, .timeout = 5},
       {.save = 1000, .copy = 4},
       7},
      // While the state is saved.
      {"", {.where = {"2/0:copy@21"}, .timeout = 5}, {.save = 7}, 3}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.stop.where[0]);
    const Outcome outcome = survive("recovering_trainer.train_pipeline", one.deaths, one.intervals, one.stop);
    EXPECT_EQ(outcome.sums, expected) << outcome.output;
    for (const RecoveryReport& report : outcome.reports)
      EXPECT_LE(report.rebuilds, one.rebuilds) << outcome.output;
    EXPECT_GE(outcome.reports[0].rebuilds, static_cast<int>(one.stop.where.size())) << outcome.output;
    for (const std::string& where : one.stop.where) {
      EXPECT_GE(outcome.reports[static_cast<std::size_t>(where[0] - '0')].rebuilds, 1)
          << "the process stopped in " << where << " went on" << outcome.output;
    }
  }
}

TEST_F(Recovering, PipelinesGoOnWithTheReplacementOfAStoppedProcessThatIsKilled) {
  const std::string expected = undisturbed("recovering_trainer.train_pipeline");
  const Outcome outcome = survive("recovering_trainer.train_pipeline", "", {.save = 1000, .copy = 4},
                                  {.where = {"2/0:step@20"}, .signal = SIGKILL});
  EXPECT_EQ(outcome.sums, expected) << outcome.output;
  EXPECT_GE(outcome.reports[0].from_copies, 1) << outcome.output;
}

TEST_F(Recovering, RemoteModulesWaitForAStoppedProcess) {
  const std::string expected = undisturbed("recovering_trainer.train_remotely");
  const Outcome outcome =
      survive("recovering_trainer.train_remotely", "", {.save = 7}, {.where = {"1/0:step@14"}, .timeout = 3});
  EXPECT_EQ(outcome.sums, expected) << outcome.output;
}

TEST_F(Recovering, AProcessThatStaysStoppedEndsTheTrainingWithItsNameAndAdvice) {
  const Outcome outcome = run("recovering_trainer.train_pipeline", "", {.save = 7, .copy = 4}, 9,
                              {.where = {"2/0:step@20"}, .signal = 0, .timeout = 5, .limit = 3});
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              ::testing::AllOf(
                  ::testing::HasSubstr("RecoveryOptions::replacement_limit (3 s)"),
                  ::testing::HasSubstr("'worker2' (rank 2, process "),
                  ::testing::HasSubstr("is stopped by a signal or a debugger; continue it (kill -CONT")));
}

TEST_F(Recovering, AProgramThatFailsEndsTheTrainingOnAllRanks) {
  const Outcome outcome = run("recovering_trainer.fail", "", {.save = 7, .copy = 3}, 0);
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, ::testing::HasSubstr("the program of this rank failed"));
}

TEST_F(Recovering, AStepThatNeverSucceedsEndsTheTrainingWithItsReason) {
  const Outcome outcome = run("recovering_trainer.lose", "", {.save = 3}, 0, {.limit = 2});
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              ::testing::AllOf(::testing::HasSubstr("RecoveryOptions::replacement_limit (2 s)"),
                               ::testing::HasSubstr("worker 'table' has left")));
}

const testing::Scenarios kScenarios("recovering_trainer", {{"train_pipeline", train_pipeline},
                                                           {"train_remotely", train_remotely},
                                                           {"fail", fail},
                                                           {"lose", lose}});

}  // namespace
}  // namespace torchspan::recovering_trainer_test
