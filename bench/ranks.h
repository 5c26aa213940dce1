#pragma once
// What benchmarks of groups share: one process per rank, which all measure the same figures in the same order, so that
// their calls match.
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <torchspan/collective.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "bench/harness.h"
#include "collective/serial/blocking_collectives.h"
#include "collective/world_link.h"
#include "rendezvous/api/environment.h"

namespace torchspan::bench {

/// A tensor size, and how often it is measured in a round.
struct TensorSize {
  std::string name;
  std::int64_t bytes;
  int repeats;
};

/// How a rank joins the world that its environment describes.
struct JoinPlan {
  collective::GroupOptions group = {};
  std::string address = "unix:/none";
  std::string host_id = {};  ///< empty: this machine
  bool tls = false;
};

/// This process as one rank: its world, a group of all ranks, and the engines of peers.
class Rank {
 public:
  explicit Rank(const JoinPlan& plan)
      : executor_(make_executor()),
        environment_(rendezvous::read_environment(rendezvous::process_environment())),
        runtime_(*executor_, environment_.name) {
    rendezvous::MembershipOptions join;
    join.name = environment_.name;
    join.rank = environment_.rank;
    join.world_size = environment_.world_size;
    join.store_address = environment_.store_address();
    join.address = plan.address;
    join.host_id = plan.host_id;
    join.job = environment_.job;
    const net::Secret secret = rendezvous::load_secret(environment_);
    world_ = rendezvous::Membership::join(runtime_,
                                          plan.tls ? rendezvous::tls_transports(*executor_, secret)
                                                   : rendezvous::stream_transports(*executor_, secret),
                                          join);
    group_ = std::make_unique<collective::Group>(collective::Group::make(runtime_, *world_, plan.group));
  }

  const rendezvous::WorkerEnvironment& environment() const { return environment_; }
  collective::Group& group() { return *group_; }
  std::shared_ptr<collective::WorldLink> link() {
    return collective::WorldLink::make(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime_), *world_);
  }
  void add_peer(std::string name, std::unique_ptr<collective::BlockingCollectives> engine) {
    peers_.emplace_back(std::move(name), std::move(engine));
  }
  const auto& peers() const { return peers_; }

  /// Measures what `add` adds, prints the section on rank 0, and leaves the world.
  void measure(const std::function<void(Bench& bench)>& add) {
    at::set_num_threads(1);
    Bench bench(*executor_);
    add(bench);
    bench.run(rounds_or(9));
    if (environment_.rank == 0) print_section(bench.metrics());
    group_->barrier();
    peers_.clear();
    group_.reset();
    world_->leave(executor_->deadline_in(std::chrono::seconds(10)));
  }

 private:
  const std::unique_ptr<Executor> executor_;
  const rendezvous::WorkerEnvironment environment_;
  Runtime runtime_;
  std::unique_ptr<rendezvous::Membership> world_;
  std::unique_ptr<collective::Group> group_;
  std::vector<std::pair<std::string, std::unique_ptr<collective::BlockingCollectives>>> peers_;
};

/// Starts a process with this process's environment; -1 if it cannot.
inline pid_t start_process(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t pid = -1;
  return posix_spawnp(&pid, words[0], nullptr, nullptr, words.data(), environ) == 0 ? pid : -1;
}

inline bool ends_well(pid_t pid) {
  int status = 0;
  return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Calls `start`, which starts the ranks and waits for them, with an environment that has the job's secret and address.
inline bool with_job(const char* address, const char* port, const std::function<bool()>& start) {
  std::string folder = (std::filesystem::temp_directory_path() / "torchspan-bench-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return false;
  net::Secret::random().write_file(folder + "/secret");
  setenv("TORCHSPAN_SECRET_FILE", (folder + "/secret").c_str(), 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  setenv("MASTER_ADDR", address, 1);
  setenv("MASTER_PORT", port, 1);
  const bool well = start();
  std::filesystem::remove_all(folder);
  return well;
}

}  // namespace torchspan::bench
