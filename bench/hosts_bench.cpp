// Section hosts: two processes on two simulated hosts, which are network namespaces connected by a virtual Ethernet
// pair (root only). TorchSpan's groups, encrypted, in turns with LibTorch's Gloo, in the clear.
// TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
#include "bench/ranks.h"
#include "collective/c10d/gloo.h"
#include "tests/support/hosts.h"

namespace torchspan {
namespace {

using testing::TestHost;
using testing::TestNetwork;

const std::vector<bench::TensorSize> kSizes = {{"1KiB", 1 << 10, 100},
                                               {"64KiB", 64 << 10, 50},
                                               {"1MiB", 1 << 20, 20},
                                               {"25MiB", 25 << 20, 3},
                                               {"100MiB", 100 << 20, 1}};

void measure() {
  const char* const host = std::getenv("BENCH_HOST");  // both namespaces have the kernel's boot id
  bench::Rank rank({.group = {.backend = collective::BackendKind::kNetwork},
                    .address = std::string("tls:") + host + ":1",
                    .host_id = host,
                    .tls = true});
  rank.add_peer("gloo", collective::connect_gloo(rank.link(), rank.group().ranks(),
                                                 {.timeout = std::chrono::seconds(60)}));
  rank.measure([&](bench::Bench& bench) {
    for (const bench::TensorSize& size : kSizes) {
      const at::Tensor mine = at::zeros({size.bytes / 4});
      bench.add("gloo/all_reduce/" + size.name, size.repeats,
                [mine, gloo = rank.peers()[0].second.get()] { gloo->all_reduce(mine, collective::kSum); });
      bench.add("collective/all_reduce/" + size.name + "/hosts/gloo", size.repeats,
                [mine, &rank] { rank.group().all_reduce(mine, collective::kSum).wait(); },
                {.peer = "gloo/all_reduce/" + size.name});
    }
  });
}

pid_t start_rank(const TestHost& host, int rank, const char* address) {
  std::vector<std::string> command = host.through();
  command.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("BENCH_HOST", address, 1);
  return bench::start_process(command);
}

/// Starts a rank on each host and waits for both.
bool start_ranks() {
  const TestNetwork network;
  if (!network.trouble().empty()) {
    std::fprintf(stderr, "bench_hosts: nothing is measured: no two hosts: %s\n", network.trouble().c_str());
    bench::print_section(nlohmann::json::array());
    return true;
  }
  return bench::with_job(TestNetwork::kNear, "29418", [&] {
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    setenv("LOCAL_RANK", "0", 1);
    const pid_t near = start_rank(network.near, 0, TestNetwork::kNear);
    const pid_t far = start_rank(network.far, 1, TestNetwork::kFar);
    const bool near_well = bench::ends_well(near), far_well = bench::ends_well(far);
    return near_well && far_well;
  });
}

}  // namespace
}  // namespace torchspan

int main() {
  if (std::getenv("RANK") == nullptr) return torchspan::start_ranks() ? 0 : 1;
  torchspan::measure();
}
