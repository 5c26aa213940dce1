// Elastic training with real processes that are killed and stopped: the survivors go on, replacements join, and the
// result is that of one process that runs the same schedule.
#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/optim.h>
#include <torchspan/session.h>

#include "data/api/sampler.h"
#include "tests/support/cluster_main.h"
#include "tests/support/environment.h"

namespace torchspan::survival_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Process;
using testing::ProcessWorld;
using testing::require;

constexpr int kRanks = 4;
constexpr std::int64_t kSamples = 101, kFeatures = 6;
/// Rank 0 waits for missing ranks at every multiple of it.
constexpr std::int64_t kGate = 20;

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

ElasticOptions training_options() {
  ElasticOptions options;
  options.samples = kSamples;
  options.batch = 16;
  options.seed = 5;
  return options;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool with_norm) {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(kFeatures, 24));
    second = register_module("second", torch::nn::Linear(24, 3));
    if (with_norm) norm = register_module("norm", torch::nn::BatchNorm1d(24));
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first->forward(x);
    if (norm) x = norm->forward(x);
    return second->forward(torch::dropout(torch::tanh(x), 0.2, is_training()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

optim::Optimizer make_optimizer(const Net& net) {
  return {*net, optim::SGD{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3}};
}

/// The loss of one rank's part of a step.
template <class Model>
torch::Tensor loss_of(Model& model, const DataStep& step) {
  torch::manual_seed(step.seed);  // of the dropout
  const torch::Tensor at = torch::tensor(step.samples, torch::kDouble).unsqueeze(1);
  const torch::Tensor features = torch::sin(at * torch::arange(1, kFeatures + 1, torch::kDouble));
  const torch::Tensor labels = at.squeeze(1).to(torch::kLong).remainder(3);
  return torch::cross_entropy_loss(model.forward(features), labels, {}, at::Reduction::Sum) * step.weight;
}

std::string digest_of(const Net& net) {
  std::string text;
  for (const torch::Tensor& tensor : net->parameters()) {
    const torch::Tensor flat = tensor.detach().contiguous();
    const auto* words = reinterpret_cast<const std::uint64_t*>(flat.data_ptr<double>());
    std::uint64_t digest = 0;
    for (std::int64_t i = 0; i < flat.numel(); ++i) digest = (digest ^ words[i]) * 0x9e3779b97f4a7c15u;
    text += fmt::format("{:x} ", digest);
  }
  return text;
}

/// When this process kills itself: "forward@40".
struct Death {
  Death() {
    const std::string text = text_of("TEST_DEATH");
    const auto place = text.find('@');
    if (place == std::string::npos) return;
    phase = text.substr(0, place);
    step = std::stoll(text.substr(place + 1));
  }
  void at(const std::string& where, std::int64_t number) const {
    if (where == phase && number >= step && !std::exchange(done, true)) {
      if (text_of("TEST_SIGNAL") == "throw") throw std::runtime_error("the program of this rank failed");
      ::kill(getpid(), text_of("TEST_SIGNAL") == "stop" ? SIGSTOP : SIGKILL);
    }
  }
  std::string phase;
  std::int64_t step = 0;
  mutable bool done = false;  ///< a stopped process goes on
};

/// A part of the state whose process dies while it is sent or received.
struct Trap {
  const Death& death;
  std::int64_t& applied;
  Executor& executor;
  optim::StateDict state_dict() const {
    death.at("send", applied);
    optim::StateDict state;
    state.insert("applied", torch::tensor(applied));
    return state;
  }
  void load_state_dict(const optim::StateDict& state) {
    death.at("receive", 0);
    if (text_of("TEST_SLOW") == "1") executor.sleep(seconds(2));
    applied = state["applied"].item<std::int64_t>();
  }
};

std::size_t ready_count(const std::string& folder) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    count += entry.path().filename().string().starts_with("ready-") ? 1 : 0;
  return count;
}

/// Gives replacements time to start while ranks are missing.
void await_missing_ranks(Executor& executor, const std::string& folder, const ElasticStep& step) {
  if (step.rank != 0 || step.size == kRanks || step.number % kGate != 0) return;
  if (text_of("TEST_SIGNAL") == "throw") return;  // nothing replaces it
  const std::size_t before = ready_count(folder);
  const Deadline limit = executor.deadline_in(text_of("TEST_SIGNAL") == "stop" ? seconds(2) : seconds(10));
  while (ready_count(folder) == before && !limit.passed(executor.now())) executor.sleep(milliseconds(5));
}

void shut_down(Session& session) {
  try {
    session.shutdown();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kDisconnected, error.what());  // a rank died at the end
  }
}

/// Trains; writes a line per applied step.
void train() {
  Session session(WorkerOptions::from_env());
  const std::string folder = text_of("TEST_FOLDER");
  const std::int64_t steps = std::stoll(text_of("TEST_STEPS"));
  const bool with_norm = text_of("TEST_NORM") == "1";
  const Death death;
  Net net(with_norm);
  optim::Optimizer optimizer = make_optimizer(net);
  std::int64_t applied = 0;
  Trap trap{death, applied, session.runtime().executor};
  ElasticOptions options = training_options();
  if (with_norm) options.samples = 96;  // a batch norm needs two values
  if (text_of("TEST_OWN_BUFFERS") == "1") options.data_parallel.broadcast_buffers = false;
  if (text_of("TEST_SIGNAL") == "stop") options.step_timeout = seconds(3);
  if (text_of("TEST_SLOW") == "1") options.step_timeout = seconds(1);
  if (text_of("TEST_CATCHES") == "1") options.step_timeout = seconds(300);  // the others must not wait for it
  if (text_of("TEST_MIN") == "4") {
    options.min_ranks = 4;
    options.too_few_limit = seconds(1);
  }
  ElasticTrainer trainer(session, net, options);
  trainer.add("trap", trap);
  trainer.add("optimizer", optimizer);
  std::ofstream log(fmt::format("{}/log-{}-{}", folder, session.rank(), getpid()));
  std::ofstream(fmt::format("{}/ready-{}", folder, getpid())) << "ready";
  const auto body = [&](auto& model, const ElasticStep& step) {
    await_missing_ranks(session.runtime().executor, folder, step);
    death.at("forward", step.number);
    torch::Tensor loss = loss_of(model, step);
    loss.register_hook([&](const torch::Tensor&) { death.at("backward", step.number); });
    loss.backward();
    death.at("vote", step.number);
  };
  const auto apply = [&](const ElasticStep& step) {
    require(step.number == applied, "steps are applied in order, each once");
    optimizer.step();
    ++applied;
    log << fmt::format("{} {} {}", step.number, step.generation, step.size) << std::endl;
    death.at("apply", step.number);
  };
  if (text_of("TEST_TWICE") == "1") trainer.run(steps / 2, body, apply);
  bool complete = false;
  try {
    complete = trainer.run(steps, body, apply);
  } catch (const std::runtime_error&) {
    if (text_of("TEST_CATCHES") != "1") throw;  // else the process goes on, and the trainer lives
  }
  require(!complete || trainer.position().step == steps, "all steps are done");
  require(!complete || applied == steps, "the state came with its steps");
  const std::string state = digest_of(net);
  if (complete) std::ofstream(fmt::format("{}/final-{}-{}", folder, session.rank(), getpid())) << state;
  shut_down(session);
}

/// The whole schedule in this process: every rank's gradients, summed in the order of ranks.
std::string replay(const std::vector<int>& sizes) {
  Net net(false);
  optim::Optimizer optimizer = make_optimizer(net);
  const ElasticOptions options = training_options();
  data::Sampler sampler({.samples = options.samples,
                         .batch = options.batch,
                         .batch_per_rank = options.batch_per_rank,
                         .seed = options.seed});
  DataPosition at;
  for (const int size : sizes) {
    std::vector<torch::Tensor> sums;
    for (int rank = 0; rank < size; ++rank) {
      for (torch::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
      loss_of(*net, sampler.step(at, rank, size)).backward();
      std::size_t place = 0;
      for (const torch::Tensor& parameter : net->parameters()) {
        if (rank == 0) {
          sums.push_back(parameter.grad().clone());
        } else {
          sums[place] += parameter.grad();
        }
        ++place;
      }
    }
    std::size_t place = 0;
    for (torch::Tensor& parameter : net->parameters()) parameter.mutable_grad() = sums[place++] / size;
    optimizer.step();
    at = sampler.after(at, size);
  }
  return digest_of(net);
}

/// Starts a world, restarts killed processes with the next of their rank's deaths, and checks the end.
class Survival {
 public:
  explicit Survival(std::int64_t steps, std::map<int, std::vector<std::string>> deaths,
                    std::map<std::string, std::string> variables = {})
      : world_(kRanks), steps_(steps), deaths_(std::move(deaths)), variables_(std::move(variables)) {
    variables_["TEST_FOLDER"] = world_.folder();
    variables_["TEST_STEPS"] = std::to_string(steps);
    for (int rank = 0; rank < kRanks; ++rank) start(rank);
  }

  Process& start(int rank) {
    auto variables = variables_;
    auto& deaths = deaths_[rank];
    if (!deaths.empty()) {
      variables["TEST_DEATH"] = deaths.front();
      deaths.erase(deaths.begin());
    }
    Process& process = world_.start(rank, "survival.train", variables);
    living_[rank] = &process;
    return process;
  }

  /// Restarts dead processes until all have ended well. `each` runs every few milliseconds.
  void supervise(const std::function<void()>& each = [] {}) {
    const Deadline limit = world_.executor().deadline_in(seconds(150));
    while (!living_.empty()) {
      each();
      for (const auto& [rank, process] : std::map(living_)) {
        if (!process->wait(world_.executor(), Duration::zero())) continue;
        living_.erase(rank);
        if (process->exit_code() == 128 + SIGKILL) {
          ++kills_;
          if (restarts_) start(rank);
        } else if (process->exit_code() == 1) {
          failures_.push_back(process->output());
        } else {
          ASSERT_EQ(process->exit_code(), 0) << "rank " << rank << ":\n" << process->output();
        }
      }
      ASSERT_FALSE(limit.passed(world_.executor().now())) << "still running; rank 0:\n"
                                                          << living_.begin()->second->output();
      world_.executor().sleep(milliseconds(5));
    }
  }

  /// The number of ranks in each step, from the log of rank 0, which never dies. Other ranks' logs must agree.
  std::vector<int> sizes() const {
    std::map<std::int64_t, std::pair<std::uint64_t, int>> steps;
    for (const auto& entry : std::filesystem::directory_iterator(world_.folder())) {
      if (!entry.path().filename().string().starts_with("log-")) continue;
      std::ifstream file(entry.path());
      std::string line;
      while (std::getline(file, line)) {
        std::istringstream in(line);
        std::int64_t number = -1;
        std::pair<std::uint64_t, int> terms;
        in >> number >> terms.first >> terms.second;
        const auto [place, fresh] = steps.emplace(number, terms);
        EXPECT_EQ(place->second, terms) << "step " << number << " in " << entry.path();
      }
    }
    std::vector<int> sizes;
    for (const auto& [number, terms] : steps) {
      EXPECT_EQ(number, static_cast<std::int64_t>(sizes.size()));
      sizes.push_back(terms.second);
    }
    return sizes;
  }

  /// The final states of all ranks.
  std::vector<std::string> finals() const {
    std::vector<std::string> states;
    for (const auto& entry : std::filesystem::directory_iterator(world_.folder())) {
      if (!entry.path().filename().string().starts_with("final-")) continue;
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      states.push_back(text.str());
    }
    return states;
  }

  void expect_right_result(std::size_t ranks = kRanks) const {
    const std::vector<int> sizes = this->sizes();
    ASSERT_EQ(static_cast<std::int64_t>(sizes.size()), steps_);
    const auto finals = this->finals();
    EXPECT_EQ(finals.size(), ranks);
    const std::string expected = replay(sizes);
    for (const std::string& state : finals) EXPECT_EQ(state, expected);
  }

  /// Steps that rank 0 has applied.
  std::int64_t progress() const {
    for (const auto& entry : std::filesystem::directory_iterator(world_.folder())) {
      if (!entry.path().filename().string().starts_with("log-0-")) continue;
      std::ifstream file(entry.path());
      return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
    }
    return 0;
  }
  ProcessWorld& world() { return world_; }
  std::map<int, Process*>& living() { return living_; }
  int kills() const { return kills_; }
  /// Output of the processes whose program failed.
  const std::vector<std::string>& failures() const { return failures_; }
  void restart_nothing() { restarts_ = false; }

 private:
  ProcessWorld world_;
  const std::int64_t steps_;
  std::map<int, std::vector<std::string>> deaths_;
  std::map<std::string, std::string> variables_;
  std::map<int, Process*> living_;
  int kills_ = 0;
  bool restarts_ = true;
  std::vector<std::string> failures_;
};

TEST(Survival, TrainsAsOneProcessDoes) {
  Survival survival(60, {});
  survival.supervise();
  EXPECT_EQ(survival.kills(), 0);
  survival.expect_right_result();
}

TEST(Survival, GoesOnAfterADeathInEachPhaseOfAStep) {
  Survival survival(300, {{1, {"forward@15", "apply@110"}}, {2, {"backward@45"}}, {3, {"vote@75"}}});
  survival.supervise();
  EXPECT_EQ(survival.kills(), 4);
  survival.expect_right_result();
}

TEST(Survival, GoesOnAfterDeathsInATransfer) {
  // Rank 3 is the donor of rank 1; the next process of rank 1 dies while it receives from rank 2.
  Survival survival(200, {{1, {"forward@15", "receive@0"}}, {3, {"send@1"}}});
  survival.supervise();
  EXPECT_EQ(survival.kills(), 3);
  survival.expect_right_result();
}

TEST(Survival, GoesOnFromOneRunToTheNextWithBatchNorms) {
  Survival survival(200, {{1, {"forward@45", "forward@130"}}, {2, {"vote@75"}}},
                    {{"TEST_TWICE", "1"}, {"TEST_NORM", "1"}});
  survival.supervise();
  EXPECT_EQ(survival.kills(), 3);
  const auto finals = survival.finals();
  EXPECT_EQ(finals.size(), static_cast<std::size_t>(kRanks));
  for (const std::string& state : finals) EXPECT_EQ(state, finals.front());
  EXPECT_EQ(survival.sizes().size(), 200u);
}

TEST(Survival, ReplacementsJoinRanksThatHaveBuffersOfTheirOwn) {
  Survival survival(100, {{1, {"forward@45"}}, {2, {"vote@60"}}},
                    {{"TEST_NORM", "1"}, {"TEST_OWN_BUFFERS", "1"}});
  survival.supervise();
  EXPECT_EQ(survival.kills(), 2);
  EXPECT_EQ(survival.finals().size(), static_cast<std::size_t>(kRanks));
  EXPECT_EQ(survival.sizes().size(), 100u);
}

TEST(Survival, GoesOnWithoutARankWhoseProgramThrows) {
  for (const char* where : {"forward@30", "backward@30", "vote@30"}) {
    SCOPED_TRACE(where);
    Survival survival(100, {{2, {where}}}, {{"TEST_SIGNAL", "throw"}});
    survival.supervise();
    ASSERT_EQ(survival.failures().size(), 1u) << survival.failures().back();
    EXPECT_THAT(survival.failures()[0], ::testing::HasSubstr("the program of this rank failed"));
    EXPECT_EQ(survival.sizes().back(), 3);
    survival.expect_right_result(3);
  }
}

TEST(Survival, GoesOnWithoutARankWhoseProgramCatchesWhatItThrew) {
  for (const char* where : {"forward@30", "vote@30"}) {
    SCOPED_TRACE(where);
    Survival survival(60, {{2, {where}}}, {{"TEST_SIGNAL", "throw"}, {"TEST_CATCHES", "1"}});
    survival.supervise();
    EXPECT_THAT(survival.failures(), ::testing::IsEmpty());
    EXPECT_EQ(survival.sizes().back(), 3);
    survival.expect_right_result(3);
  }
}

TEST(Survival, EndsWithAnErrorBelowTheLeastNumberOfRanks) {
  Survival survival(100, {{2, {"forward@30"}}}, {{"TEST_MIN", "4"}});
  survival.restart_nothing();
  survival.supervise();
  ASSERT_EQ(survival.failures().size(), 3u);
  for (const std::string& text : survival.failures()) {
    EXPECT_THAT(text, ::testing::HasSubstr("only 3 ranks can train, and min_ranks is 4: rank 2: worker2"));
  }
}

TEST(Survival, EndsWithAnErrorIfACopyOfTheStateTakesLongerThanTheTimeout) {
  Survival survival(100, {}, {{"TEST_SLOW", "1"}});
  survival.supervise();
  EXPECT_THAT(survival.failures(), ::testing::Contains(::testing::AllOf(
                                       ::testing::HasSubstr("failed before its first step"),
                                       ::testing::HasSubstr("ElasticOptions::step_timeout (1 s)"))));
}

TEST(Survival, GoesOnAfterKillsAtRandomMoments) {
  const auto seed = testing::number_from("TORCHSPAN_SEED", std::uint64_t{1});
  SCOPED_TRACE("TORCHSPAN_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  Survival survival(800, {});
  int kills = 0;
  std::size_t ready = 0;
  Deadline next = Deadline::never();
  survival.supervise([&] {
    Executor& executor = survival.world().executor();
    const std::size_t now_ready = ready_count(survival.world().folder());
    if (now_ready != ready && now_ready >= kRanks) next = executor.deadline_in(milliseconds(random() % 150));
    ready = now_ready;
    if (kills == 3 || survival.progress() > 600 || !next.passed(executor.now())) return;
    next = Deadline::never();
    const auto victim = survival.living().find(1 + static_cast<int>(random() % 3));
    if (victim == survival.living().end()) return;
    victim->second->kill(SIGKILL);
    ++kills;
  });
  EXPECT_EQ(survival.kills(), kills);
  EXPECT_GE(kills, 1);
  EXPECT_EQ(survival.finals().size(), static_cast<std::size_t>(kRanks));
  const std::string expected = replay(survival.sizes());
  for (const std::string& state : survival.finals()) EXPECT_EQ(state, expected);
}

TEST(Survival, GoesOnWithoutAStoppedProcessWhichJoinsAgain) {
  Survival survival(160, {{2, {"forward@25"}}}, {{"TEST_SIGNAL", "stop"}});
  Deadline wake = Deadline::never();
  bool woken = false;
  survival.supervise([&] {
    const auto stopped = survival.living().find(2);
    if (woken || stopped == survival.living().end()) return;
    Executor& executor = survival.world().executor();
    std::ifstream stat(fmt::format("/proc/{}/stat", stopped->second->pid()));
    std::string pid, name, state;
    stat >> pid >> name >> state;
    if (state == "T" && wake.is_never()) wake = executor.deadline_in(seconds(9));
    if (!wake.passed(executor.now())) return;
    woken = true;
    stopped->second->kill(SIGCONT);
    std::ofstream(survival.world().folder() + "/ready-again") << "ready";
  });
  EXPECT_TRUE(woken);
  const std::vector<int> sizes = survival.sizes();
  EXPECT_NE(std::count(sizes.begin(), sizes.end(), 3), 0) << "the others did not go on";
  EXPECT_EQ(sizes.back(), 4) << "the stopped process did not join again";
  survival.expect_right_result();
}

const testing::Scenarios kScenarios("survival", {{"train", train}});

}  // namespace
}  // namespace torchspan::survival_test
