// Section survive: steps per second of elastic training while a rank is killed every few seconds and restarted, against
// the same training without kills. Four ranks, the same number of samples in every step.
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/optim.h>
#include <torchspan/session.h>

#include "bench/harness.h"
#include "tests/support/processes.h"

namespace {

using namespace torchspan;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kRanks = 4;
constexpr std::array kBetweenKills{0, 2, 5, 10, 20};  // seconds; 0: no kills
/// Steps before the measurement.
constexpr std::int64_t kWarmUp = 50;

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(784, 512), torch::nn::ReLU(), torch::nn::Linear(512, 512),
                               torch::nn::ReLU(), torch::nn::Linear(512, 10));
}

/// A worker: trains, and writes the times of its steps and its final parameters.
void train() {
  at::set_num_threads(1);
  Session session(WorkerOptions::from_env());
  const std::string folder = text_of("BENCH_FOLDER");
  const torch::Tensor images = torch::rand({4096, 784}), labels = torch::arange(4096).remainder(10);
  torch::nn::Sequential model = make_model();
  optim::Optimizer optimizer(*model, optim::SGD{.lr = 0.01, .momentum = 0.9});
  ElasticTrainer trainer(session, model, {.samples = images.size(0), .batch = 256});
  trainer.add("optimizer", optimizer);
  Executor& executor = session.runtime().executor;
  TimePoint begin = executor.now();
  std::ofstream progress(folder + "/progress-" + std::to_string(session.rank()));
  const bool complete = trainer.run(
      std::stoll(text_of("BENCH_STEPS")),
      [&](auto& model, const ElasticStep& step) {
        const torch::Tensor mine = torch::tensor(step.samples);
        const torch::Tensor output = model.forward(images.index_select(0, mine));
        const torch::Tensor loss =
            torch::cross_entropy_loss(output, labels.index_select(0, mine), {}, at::Reduction::Sum);
        (loss * step.weight).backward();
      },
      [&](const ElasticStep& step) {
        optimizer.step();
        if (step.number == kWarmUp) begin = executor.now();
        if (step.number % 50 == 0) progress << step.number << std::endl;
      });
  if (session.rank() == 0) std::ofstream(folder + "/seconds") << to_seconds(executor.now() - begin);
  if (complete) torch::save(model, folder + "/final-" + std::to_string(session.rank()));
  try {
    session.shutdown();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDisconnected) throw;  // a rank died at the end
  }
}

/// Runs the training, which takes about that many seconds; kills a random rank other than 0 every `between` seconds, if
/// not 0. Returns steps per second.
double run(std::int64_t steps, double seconds, double between, int& kills) {
  testing::ProcessWorld world(kRanks);
  const std::map<std::string, std::string> variables{{"BENCH_FOLDER", world.folder()},
                                                     {"BENCH_STEPS", std::to_string(steps)}};
  std::map<int, testing::Process*> living;
  for (int rank = 0; rank < kRanks; ++rank) living[rank] = &world.start(rank, "train", variables);
  Executor& executor = world.executor();
  while (!std::filesystem::exists(world.folder() + "/progress-0")) executor.sleep(milliseconds(5));
  std::mt19937 random(7);
  const auto after = [&](double time) {
    return executor.deadline_in(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(time)));
  };
  Deadline kill_at = between > 0 ? after(between / 2) : Deadline::never();
  int left = between > 0 ? static_cast<int>(seconds / between) : 0;
  while (!living.empty()) {
    for (const auto& [rank, process] : std::map(living)) {
      if (!process->wait(executor, Duration::zero())) continue;
      living.erase(rank);
      if (process->exit_code() == 128 + SIGKILL) {
        living[rank] = &world.start(rank, "train", variables);
      } else if (process->exit_code() != 0) {
        throw std::runtime_error("rank " + std::to_string(rank) + " failed: " + process->output());
      }
    }
    if (left > 0 && kill_at.passed(executor.now())) {
      const auto victim = living.find(1 + static_cast<int>(random() % (kRanks - 1)));
      if (victim != living.end()) victim->second->kill(SIGKILL);
      kill_at = after(between);
      --left;
      ++kills;
    }
    executor.sleep(milliseconds(5));
  }
  double took = 0;
  std::ifstream(world.folder() + "/seconds") >> took;
  torch::nn::Sequential first = make_model(), other = make_model();
  torch::load(first, world.folder() + "/final-0");
  for (int rank = 1; rank < kRanks; ++rank) {
    torch::load(other, world.folder() + "/final-" + std::to_string(rank));
    for (std::size_t i = 0; i < first->parameters().size(); ++i) {
      if (!torch::equal(first->parameters()[i], other->parameters()[i]))
        throw std::runtime_error("the parameters of rank " + std::to_string(rank) +
                                 " differ from those of rank 0");
    }
  }
  return static_cast<double>(steps - kWarmUp) / took;
}

}  // namespace

int main() {
  if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) {
    try {
      train();
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  }
  int kills = 0;
  constexpr double kSeconds = 20;  // of each run
  const auto steps = kWarmUp + static_cast<std::int64_t>(run(400, 0, 0, kills) * kSeconds);
  std::map<int, std::vector<double>> speeds;  // by the time between two kills; 0: undisturbed
  std::map<int, int> all_kills;
  for (int round = 0; round < (bench::is_quick() ? 1 : 3); ++round) {
    for (const int between : kBetweenKills) {
      kills = 0;
      speeds[between].push_back(run(steps, kSeconds, between, kills));
      all_kills[between] += kills;
    }
  }
  const auto median = [&](int between) { return bench::percentile(speeds[between], 0.5); };
  nlohmann::json metrics = nlohmann::json::array();
  for (const int between : kBetweenKills) {
    if (between == 0) continue;
    metrics.push_back({{"name", "survive/goodput/kill_" + std::to_string(between) + "s"},
                       {"unit", "steps/s"},
                       {"value", median(between)},
                       {"kills", all_kills[between]},
                       {"peer", "undisturbed"},
                       {"peer_value", median(0)},
                       {"ratio", median(0) / median(between)}});  // of the times of a step
  }
  bench::print_section(metrics);
}
