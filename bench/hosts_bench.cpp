// Section hosts: two processes on two simulated hosts, which are network namespaces connected by a virtual Ethernet
// pair (root only). TorchSpan's groups, encrypted, in turns with LibTorch's Gloo, in the clear.
// TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
#include <cstdlib>
#include <filesystem>
#include <spawn.h>
#include <string>
#include <sys/wait.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <torchspan/collective/group.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "bench/harness.h"
#include "collective/c10d/gloo.h"
#include "collective/world_link.h"
#include "rendezvous/api/files.h"
#include "tests/support/hosts.h"

namespace torchspan {
namespace {

using collective::BlockingCollectives;
using collective::Group;
using testing::TestHost;
using testing::TestNetwork;

struct Size {
  std::string name;
  std::int64_t bytes;
  int repeats;
};

const std::vector<Size> kSizes = {{"1KiB", 1 << 10, 100},
                                  {"64KiB", 64 << 10, 50},
                                  {"1MiB", 1 << 20, 20},
                                  {"25MiB", 25 << 20, 3},
                                  {"100MiB", 100 << 20, 1}};

/// One of two ranks. Both run the same figures in the same order, so that their calls match.
class Rank {
 public:
  Rank()
      : executor_(make_executor()),
        environment_(rendezvous::read_environment(rendezvous::process_environment())),
        runtime_(*executor_, environment_.name) {
    rendezvous::MembershipOptions join;
    join.name = environment_.name;
    join.rank = environment_.rank;
    join.world_size = environment_.world_size;
    join.store_address = environment_.store_address();
    join.address = std::string("tls:") + std::getenv("BENCH_HOST") + ":1";
    join.host_id = std::getenv("BENCH_HOST");  // both namespaces have the kernel's boot id
    join.job = environment_.job;
    world_ = rendezvous::Membership::join(
        runtime_, rendezvous::tls_transports(*executor_, rendezvous::load_secret(environment_)), join);
    group_ = std::make_unique<Group>(
        Group::make(runtime_, *world_, {.backend = collective::BackendKind::kNetwork}));
  }

  void run() {
    at::set_num_threads(1);
    const std::shared_ptr<Runtime> runtime(std::shared_ptr<void>(), &runtime_);
    gloo_ = collective::connect_gloo(collective::WorldLink::make(runtime, *world_), group_->ranks(),
                                     {.timeout = std::chrono::seconds(60)});
    bench::Bench bench(*executor_);
    for (const Size& size : kSizes) add(bench, size);
    bench.run(bench::rounds_or(9));
    if (environment_.rank == 0) bench::print_section(bench.metrics());
    group_->barrier();
    gloo_.reset();
    group_.reset();
    world_->leave(executor_->deadline_in(std::chrono::seconds(10)));
  }

 private:
  void add(bench::Bench& bench, const Size& size) {
    const at::Tensor mine = at::zeros({size.bytes / 4});
    bench.add("gloo/all_reduce/" + size.name, size.repeats,
              [mine, gloo = gloo_.get()] { gloo->all_reduce(mine, collective::kSum); });
    bench.add("collective/all_reduce/" + size.name + "/hosts/gloo", size.repeats,
              [mine, this] { group_->all_reduce(mine, collective::kSum).wait(); },
              {.peer = "gloo/all_reduce/" + size.name});
  }

  const std::unique_ptr<Executor> executor_;
  const rendezvous::WorkerEnvironment environment_;
  Runtime runtime_;
  std::unique_ptr<rendezvous::Membership> world_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<BlockingCollectives> gloo_;
};

pid_t start_rank(const TestHost& host, int rank, const char* address) {
  std::vector<std::string> command = host.through();
  command.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("BENCH_HOST", address, 1);
  pid_t pid = -1;
  return posix_spawnp(&pid, words[0], nullptr, nullptr, words.data(), environ) == 0 ? pid : -1;
}

bool ends_well(pid_t pid) {
  int status = 0;
  return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Starts a rank on each host and waits for both.
bool start_ranks() {
  const TestNetwork network;
  if (!network.trouble().empty()) {
    std::fprintf(stderr, "bench_hosts: nothing is measured: no two hosts: %s\n", network.trouble().c_str());
    bench::print_section(nlohmann::json::array());
    return true;
  }
  std::string folder = (std::filesystem::temp_directory_path() / "torchspan-bench-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return false;
  net::Secret::random().write_file(folder + "/secret");
  setenv("TORCHSPAN_SECRET_FILE", (folder + "/secret").c_str(), 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  setenv("MASTER_ADDR", TestNetwork::kNear, 1);
  setenv("MASTER_PORT", "29418", 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("LOCAL_WORLD_SIZE", "1", 1);
  setenv("LOCAL_RANK", "0", 1);
  const pid_t near = start_rank(network.near, 0, TestNetwork::kNear);
  const pid_t far = start_rank(network.far, 1, TestNetwork::kFar);
  const bool near_well = ends_well(near), far_well = ends_well(far);
  std::filesystem::remove_all(folder);
  return near_well && far_well;
}

}  // namespace
}  // namespace torchspan

int main() {
  if (std::getenv("RANK") == nullptr) return torchspan::start_ranks() ? 0 : 1;
  torchspan::Rank().run();
}
