// Section collective: two processes on this host, TorchSpan in turns with LibTorch's Gloo and Open MPI, and
// compared with the speed of the memory. Starts itself twice, through mpirun if Open MPI is built in.
// TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
#include <cstring>

#include "bench/ranks.h"
#include "collective/c10d/gloo.h"
#include "collective/mpi/mpi.h"

namespace torchspan {
namespace {

const std::vector<bench::TensorSize> kSizes = {
    {"64B", 64, 300},       {"1KiB", 1 << 10, 300},   {"64KiB", 64 << 10, 100}, {"1MiB", 1 << 20, 40},
    {"25MiB", 25 << 20, 5}, {"100MiB", 100 << 20, 2}, {"256MiB", 256 << 20, 1}};

void add(bench::Rank& rank, bench::Bench& bench, const bench::TensorSize& size) {
  const at::Tensor mine = at::zeros({size.bytes / 4}), copy = at::zeros({size.bytes / 4});
  const at::Tensor bucket = rank.group().allocate({size.bytes / 4}, at::kFloat);
  bucket.zero_();
  bench.add("memory/" + size.name, size.repeats, [=, &rank] {
    rank.group().barrier();
    std::memcpy(copy.data_ptr(), mine.data_ptr(), static_cast<std::size_t>(size.bytes));
  });
  for (const auto& [name, engine] : rank.peers()) {
    bench.add(name + "/all_reduce/" + size.name, size.repeats,
              [mine, engine = engine.get()] { engine->all_reduce(mine, collective::kSum); });
  }
  for (const auto& [name, engine] : rank.peers()) {
    const auto against = [&, name = name](const char* where, const at::Tensor& tensor) {
      bench.add("collective/all_reduce/" + size.name + "/" + where + "/" + name, size.repeats,
                [tensor, &rank] { rank.group().all_reduce(tensor, collective::kSum).wait(); },
                {.limit = "memory/" + size.name, .peer = name + "/all_reduce/" + size.name});
    };
    against("private", mine);
    against("shared_buckets", bucket);
  }
}

void measure() {
  bench::Rank rank({});
  const std::vector<int> ranks = rank.group().ranks();
  if (collective::has_gloo())  // pip's LibTorch has no headers of it
    rank.add_peer("gloo",
                  collective::connect_gloo(rank.link(), ranks, {.timeout = std::chrono::seconds(60)}));
  const auto& environment = rank.environment();
  if (environment.launcher == rendezvous::Launcher::kOpenMpi) {
    rank.add_peer("openmpi", collective::connect_mpi(ranks, environment.rank, environment.world_size));
  }
  rank.measure([&](bench::Bench& bench) {
    for (const bench::TensorSize& size : kSizes) add(rank, bench, size);
  });
}

/// Starts the two ranks, through mpirun if it works, and waits for them.
bool start_ranks() {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
#if defined(TORCHSPAN_MPI)
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  if (bench::ends_well(
          bench::start_process({"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", self}))) {
    return true;
  }
#endif
  setenv("WORLD_SIZE", "2", 1);
  setenv("LOCAL_WORLD_SIZE", "2", 1);
  std::vector<pid_t> pids;
  for (const char* rank : {"0", "1"}) {
    setenv("RANK", rank, 1);
    setenv("LOCAL_RANK", rank, 1);
    pids.push_back(bench::start_process({self}));
  }
  const bool first = bench::ends_well(pids[0]), second = bench::ends_well(pids[1]);
  return first && second;
}

}  // namespace
}  // namespace torchspan

int main() {
  if (std::getenv("RANK") == nullptr && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) {
    return torchspan::bench::with_job("127.0.0.1", "29417", torchspan::start_ranks) ? 0 : 1;
  }
  torchspan::measure();
}
