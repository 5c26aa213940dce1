// Section collective: two processes on this host, TorchSpan in turns with LibTorch's Gloo and Open MPI, and
// compared with the speed of the memory. Starts itself twice, through mpirun if Open MPI is built in.
// TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
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
#include "collective/mpi/mpi.h"
#include "collective/world_link.h"
#include "rendezvous/api/files.h"

namespace torchspan {
namespace {

using collective::BlockingCollectives;
using collective::Group;

struct Size {
  std::string name;
  std::int64_t bytes;
  int repeats;
};

const std::vector<Size> kSizes = {{"64B", 64, 300},        {"1KiB", 1 << 10, 300}, {"64KiB", 64 << 10, 100},
                                  {"1MiB", 1 << 20, 40},   {"25MiB", 25 << 20, 5}, {"100MiB", 100 << 20, 2},
                                  {"256MiB", 256 << 20, 1}};

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
    join.address = "unix:/none";
    join.job = environment_.job;
    world_ = rendezvous::Membership::join(
        runtime_, rendezvous::stream_transports(*executor_, rendezvous::load_secret(environment_)), join);
    group_ = std::make_unique<Group>(Group::make(runtime_, *world_));
  }

  void run() {
    at::set_num_threads(1);
    const std::vector<int> ranks = group_->ranks();
    const std::shared_ptr<Runtime> runtime(std::shared_ptr<void>(), &runtime_);
    peers_.emplace_back("gloo", collective::connect_gloo(collective::WorldLink::make(runtime, *world_), ranks,
                                                         {.timeout = std::chrono::seconds(60)}));
    if (environment_.launcher == rendezvous::Launcher::kOpenMpi) {
      peers_.emplace_back("openmpi",
                          collective::connect_mpi(ranks, environment_.rank, environment_.world_size));
    }
    bench::Bench bench(*executor_);
    for (const Size& size : kSizes) add(bench, size);
    bench.run(bench::rounds_or(9));
    if (environment_.rank == 0) bench::print_section(bench.metrics());
    group_->barrier();
    peers_.clear();
    group_.reset();
    world_->leave(executor_->deadline_in(std::chrono::seconds(10)));
  }

 private:
  void add(bench::Bench& bench, const Size& size) {
    const at::Tensor mine = at::zeros({size.bytes / 4}), copy = at::zeros({size.bytes / 4});
    const at::Tensor bucket = group_->allocate({size.bytes / 4}, at::kFloat);
    bucket.zero_();
    bench.add("memory/" + size.name, size.repeats, [=, this] {
      group_->barrier();
      std::memcpy(copy.data_ptr(), mine.data_ptr(), static_cast<std::size_t>(size.bytes));
    });
    for (const auto& [name, wire] : peers_) {
      bench.add(name + "/all_reduce/" + size.name, size.repeats,
                [mine, wire = wire.get()] { wire->all_reduce(mine, collective::kSum); });
    }
    for (const auto& [name, wire] : peers_) {
      const auto against = [&, name = name](const char* where, const at::Tensor& tensor) {
        bench.add("collective/all_reduce/" + size.name + "/" + where + "/" + name, size.repeats,
                  [=, this] { group_->all_reduce(tensor, collective::kSum).wait(); },
                  {.limit = "memory/" + size.name, .peer = name + "/all_reduce/" + size.name});
      };
      against("private", mine);
      against("shared_buckets", bucket);
    }
  }

  const std::unique_ptr<Executor> executor_;
  const rendezvous::WorkerEnvironment environment_;
  Runtime runtime_;
  std::unique_ptr<rendezvous::Membership> world_;
  std::unique_ptr<Group> group_;
  std::vector<std::pair<std::string, std::unique_ptr<BlockingCollectives>>> peers_;
};

pid_t start(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t pid = -1;
  return posix_spawnp(&pid, words[0], nullptr, nullptr, words.data(), environ) == 0 ? pid : -1;
}

bool ends_well(pid_t pid) {
  int status = 0;
  return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Starts the two ranks and waits for them.
bool start_ranks() {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::string folder = (std::filesystem::temp_directory_path() / "torchspan-bench-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return false;
  net::Secret::random().write_file(folder + "/secret");
  setenv("TORCHSPAN_SECRET_FILE", (folder + "/secret").c_str(), 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", "29417", 1);
  bool well = false;
#if defined(TORCHSPAN_MPI)
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  well = ends_well(start({"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", self}));
#endif
  if (!well) {
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    std::vector<pid_t> pids;
    for (const char* rank : {"0", "1"}) {
      setenv("RANK", rank, 1);
      setenv("LOCAL_RANK", rank, 1);
      pids.push_back(start({self}));
    }
    well = ends_well(pids[0]) && ends_well(pids[1]);
  }
  std::filesystem::remove_all(folder);
  return well;
}

}  // namespace
}  // namespace torchspan

int main() {
  if (std::getenv("RANK") == nullptr && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) {
    return torchspan::start_ranks() ? 0 : 1;
  }
  torchspan::Rank().run();
}
