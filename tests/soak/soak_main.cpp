// Random calls between workers that are killed, stopped and restarted at random: `make soak`. At the end no
// future may be pending, no descriptor or reference left, and memory must not have grown.
#include <cstdio>
#include <deque>
#include <dirent.h>
#include <fmt/format.h>
#include <fstream>
#include <random>

#include <torchspan/session.h>

#include "tests/soak/traffic.h"
#include "tests/support/environment.h"
#include "tests/support/memory.h"
#include "tests/support/processes.h"

namespace torchspan::soak {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::number_from;
using testing::Process;

constexpr int kWorkers = 4;  ///< beside the driver, which is never killed: it holds the store
constexpr int kTrafficThreads = 3;
constexpr Duration kQuietEnd = seconds(8);  ///< before the end no worker is killed any more
constexpr double kGrowth = 1.10;
constexpr double kSlackMiB = 24;

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

/// Mapped memory that other processes could share.
std::size_t shared_segments() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") != std::string::npos || line.find("/dev/shm") != std::string::npos) ++count;
  }
  return count;
}

class Verdict {
 public:
  void require(bool good, const std::string& text) {
    fmt::print("{} {}\n", good ? "  ok  " : " FAIL ", text);
    if (!good) failed_ = true;
  }
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  bool failed_ = false;
};

WorkerOptions options() {
  WorkerOptions options = WorkerOptions::from_env();
  options.log_level = LogLevel::kError;
  options.rpc_timeout = seconds(5);
  return options;
}

std::vector<std::unique_ptr<rpc::Extension>> extensions() {
  std::vector<std::unique_ptr<rpc::Extension>> all;
  all.push_back(std::make_unique<Finish>());
  return all;
}

/// A worker that runs until the driver says "finish", or until it is killed.
int worker_main() {
  Session session(options(), functions(), extensions());
  Outcomes outcomes;
  make_traffic(session.worker(),
               number_from("SOAK_SEED", std::uint64_t{1}) + static_cast<std::uint64_t>(getpid()),
               Deadline::never(), outcomes);
  session.shutdown(seconds(30));
  return outcomes.wrong == 0 && outcomes.stuck == 0 ? 0 : 3;
}

void wait_until_alone(Worker& worker) {
  for (int i = 0; i < 600 && worker.world_size() > 1; ++i) {
    for (const WorkerInfo& other : worker.workers()) {
      if (other.rank == worker.info().rank) continue;
      try {
        worker.with({.timeout = seconds(2)}).rpc_sync(other, kFinish);
      } catch (const Error&) {  // it is about to leave, or has just left
      }
    }
    worker.runtime().executor.sleep(milliseconds(100));
  }
}

struct Watch {
  std::vector<double> resident;
  void sample() { resident.push_back(static_cast<double>(testing::resident().all) / (1 << 20)); }
  /// Mean of the samples between two fractions of the run.
  double mean(double from, double to) const {
    const auto begin = static_cast<std::size_t>(from * static_cast<double>(resident.size()));
    const auto end = std::max(begin + 1, static_cast<std::size_t>(to * static_cast<double>(resident.size())));
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += resident[i];
    return sum / static_cast<double>(end - begin);
  }
};

int driver_main() {
  const Duration time = seconds(number_from("SOAK_SECONDS", 600));
  const auto seed = number_from("SOAK_SEED", std::uint64_t{1});
  Session session(options(), functions(), extensions());
  Worker& worker = session.worker();
  Executor& executor = session.runtime().executor;
  const std::size_t descriptors = open_descriptors();
  const std::size_t segments = shared_segments();
  const Deadline until = executor.deadline_in(time);
  Outcomes outcomes;
  Watch watch;
  {
    std::vector<Thread> threads;
    for (int i = 0; i < kTrafficThreads; ++i) {
      threads.push_back(executor.spawn(fmt::format("traffic{}", i), [&, i] {
        make_traffic(worker, seed * 1000 + static_cast<std::uint64_t>(i), until, outcomes);
      }));
    }
    while (!until.passed(executor.now())) {
      executor.sleep(std::min<Duration>(seconds(1), time / 20));
      watch.sample();
      fmt::print("driver: {}\n", outcomes.str());
      std::fflush(stdout);
    }
  }
  // The last worker that was killed may not have started again yet.
  for (int i = 0; i < 600 && worker.world_size() <= kWorkers; ++i) executor.sleep(milliseconds(100));
  wait_until_alone(worker);
  executor.sleep(seconds(2));
  const DebugInfo debug = worker.debug();
  fmt::print("{}", debug.str());
  Verdict verdict;
  verdict.require(outcomes.good > 0, fmt::format("calls: {}", outcomes.str()));
  verdict.require(outcomes.wrong == 0, "every value was right and every error possible");
  verdict.require(outcomes.stuck == 0 && debug.pending.empty(),
                  fmt::format("{} futures pending", debug.pending.size()));
  verdict.require(debug.serving.empty(), fmt::format("{} requests not answered", debug.serving.size()));
  verdict.require(worker.world_size() == 1, fmt::format("{} workers in the world", worker.world_size()));
  verdict.require(
      debug.references.owners == 0 && debug.references.pending_users == 0 &&
          debug.references.pending_children == 0,
      fmt::format("references left: {} values, {} unconfirmed, {} children", debug.references.owners,
                  debug.references.pending_users, debug.references.pending_children));
  verdict.require(open_descriptors() <= descriptors,
                  fmt::format("{} descriptors at the start, {} at the end", descriptors, open_descriptors()));
  verdict.require(shared_segments() <= segments,
                  fmt::format("{} shared segments at the start, {} at the end", segments, shared_segments()));
  const double early = watch.mean(0.2, 0.4), late = watch.mean(0.8, 1.0);
  const bool flat = testing::kFreedMemoryIsKept || late < early * kGrowth + kSlackMiB;
  verdict.require(flat, fmt::format("resident memory {:.0f} MiB early, {:.0f} MiB late", early, late));
  session.shutdown(seconds(30));
  return verdict.exit_code();
}

/// Starts the processes, and kills, stops and restarts the workers.
class Chaos {
 public:
  Chaos()
      : time_(seconds(number_from("SOAK_SECONDS", 600))),
        seed_(number_from("SOAK_SEED", std::uint64_t{std::random_device()()})),
        random_(seed_),
        port_(testing::reserve_port()),
        executor_(make_executor()) {
    std::ofstream(folder_.path() + "/secret") << "a secret that only this soak knows, long enough\n";
    std::filesystem::permissions(folder_.path() + "/secret", std::filesystem::perms::owner_read);
  }

  int run() {
    fmt::print("soak: {} s, {} workers and a driver, seed {}\n", time_ / seconds(1), kWorkers, seed_);
    start(0, "driver");
    for (int rank = 1; rank <= kWorkers; ++rank) start(rank, "worker");
    const Deadline calm = executor_->deadline_in(time_ > 2 * kQuietEnd ? time_ - kQuietEnd : time_ / 2);
    while (!calm.passed(executor_->now())) {
      executor_->sleep(milliseconds(200 + random_() % 1500));
      strike(1 + static_cast<int>(random_() % kWorkers));
      revive();
    }
    for (auto& [rank, process] : processes_) process->kill(SIGCONT);
    for (int i = 0; i < 10; ++i) {
      executor_->sleep(milliseconds(100));
      revive();
    }
    const bool ended = processes_.at(0)->wait(*executor_, time_ + seconds(120));
    fmt::print("{}", processes_.at(0)->output());
    fmt::print("soak: {} killed, {} stopped for a while, {} restarts\n", killed_, stopped_, restarts_);
    int code = ended ? processes_.at(0)->exit_code() : 2;
    if (!ended) fmt::print(" FAIL  the driver still runs\n");
    for (int rank = 1; rank <= kWorkers; ++rank) {
      if (!processes_.at(rank)->wait(*executor_, seconds(30))) {
        fmt::print(" FAIL  worker{} still runs\n", rank);
        code = 2;
      } else if (processes_.at(rank)->exit_code() != 0) {
        fmt::print(" FAIL  worker{} ended with code {}:\n{}", rank, processes_.at(rank)->exit_code(),
                   processes_.at(rank)->output());
        code = 2;
      }
    }
    if (crashed_) code = 2;
    if (code != 0) fmt::print("soak: failed; to see it again: SOAK_SEED={}\n", seed_);
    return code;
  }

 private:
  void start(int rank, const char* role) {
    processes_[rank] = std::make_unique<Process>(
        std::vector<std::string>{"/proc/self/exe"},
        std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                           {"WORLD_SIZE", "0"},
                                           {"MASTER_ADDR", "127.0.0.1"},
                                           {"MASTER_PORT", std::to_string(port_.number())},
                                           {"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"},
                                           {"TORCHSPAN_RUNTIME_DIR", folder_.path() + "/run"},
                                           {"OMP_NUM_THREADS", "1"},
                                           {"SOAK_SECONDS", std::to_string(time_ / seconds(1))},
                                           {"SOAK_SEED", std::to_string(seed_)},
                                           {"SOAK_ROLE", role}},
        fmt::format("{}/output{}", folder_.path(), ++started_));
  }

  void strike(int rank) {
    Process& victim = *processes_.at(rank);
    if (random_() % 4 == 0) {
      ++stopped_;
      victim.kill(SIGSTOP);
      executor_->sleep(milliseconds(random_() % 3000));
      victim.kill(SIGCONT);
    } else {
      ++killed_;
      victim.kill(SIGKILL);
    }
  }

  /// Restarts every dead worker under its name; one that joins too early is refused and tries again.
  void revive() {
    for (int rank = 1; rank <= kWorkers; ++rank) {
      Process& process = *processes_.at(rank);
      if (!process.wait(*executor_, milliseconds(random_() % 20))) continue;
      const int ended = process.exit_code();
      const bool refused = ended == 1 && process.output().find("Sanitizer") == std::string::npos;
      if (ended != 128 + SIGKILL && !refused) {
        fmt::print(" FAIL  worker{} ended with code {}:\n{}", rank, ended, process.output());
        crashed_ = true;
      }
      ++restarts_;
      start(rank, "worker");
    }
  }

  const Duration time_;
  const std::uint64_t seed_;
  std::mt19937_64 random_;
  const ReservedPort port_;
  testing::TemporaryFolder folder_;
  const std::unique_ptr<Executor> executor_;
  std::map<int, std::unique_ptr<Process>> processes_;
  int started_ = 0, killed_ = 0, stopped_ = 0, restarts_ = 0;
  bool crashed_ = false;  ///< a worker ended on its own
};

}  // namespace
}  // namespace torchspan::soak

int main() {
  try {
    const char* role = std::getenv("SOAK_ROLE");
    if (role == nullptr) return torchspan::soak::Chaos().run();
    return std::string(role) == "driver" ? torchspan::soak::driver_main() : torchspan::soak::worker_main();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
