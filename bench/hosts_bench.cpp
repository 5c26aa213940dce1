// Section hosts: two processes on two simulated hosts, which are network namespaces connected by a virtual Ethernet
// pair (root only). TorchSpan's groups, encrypted, in turns with LibTorch's Gloo, in the clear; and training steps with
// compressed gradients. TORCHSPAN_BENCH_ROUNDS=1 gives quick, rough figures.
//   --delay MS --rate MBIT --loss PERCENT   over a slow link, which is a process in user space; also needs /dev/net/tun
#include <ATen/Functions.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <torchspan/data_parallel.h>
#include <torchspan/data_parallel/reducer.h>

#include "bench/ranks.h"
#include "bench/slow_link.h"
#include "collective/c10d/gloo.h"

namespace torchspan {
namespace {

using testing::LinkQuality;
using testing::SlowNetwork;
using testing::TestHost;
using testing::TestNetwork;

constexpr const char* kSlow = "BENCH_SLOW_LINK";
const std::vector<bench::TensorSize> kSlowSizes = {
    {"1KiB", 1 << 10, 10}, {"64KiB", 64 << 10, 5}, {"1MiB", 1 << 20, 3}, {"8MiB", 8 << 20, 1}};
const std::vector<bench::TensorSize> kSizes = {{"1KiB", 1 << 10, 100},
                                               {"64KiB", 64 << 10, 50},
                                               {"1MiB", 1 << 20, 20},
                                               {"25MiB", 25 << 20, 3},
                                               {"100MiB", 100 << 20, 1}};

/// A training step of a model with 4 MiB of parameters, whose gradients a hook compresses.
class CompressedStep {
 public:
  CompressedStep(const collective::Group& group, const data_parallel::CommHook& hook,
                 const std::string& name) {
    constexpr std::int64_t kWidth = 512;
    constexpr int kLayers = 4;
    torch::manual_seed(1);
    for (int i = 0; i < kLayers; ++i) net_->push_back(torch::nn::Linear(kWidth, kWidth));
    input_ = at::randn({4, kWidth});
    model_ = std::make_unique<DistributedDataParallel<torch::nn::Sequential>>(net_, group);
    if (hook) model_->register_comm_hook(hook, name);
  }
  void once() {
    net_->zero_grad();
    model_->forward(input_).sum().backward();
  }

 private:
  torch::nn::Sequential net_;
  at::Tensor input_;
  std::unique_ptr<DistributedDataParallel<torch::nn::Sequential>> model_;
};

void add_steps(bench::Bench& bench, const collective::Group& group) {
  const auto add = [&](const std::string& name, const data_parallel::CommHook& hook) {
    bench.add("ddp/step/4MiB/" + name + "/hosts", 2,
              [step = std::make_shared<CompressedStep>(group, hook, name)] { step->once(); },
              {.peer = hook ? "ddp/step/4MiB/all_reduce/hosts" : ""});
  };
  add("all_reduce", nullptr);
  add("fp16", data_parallel::fp16_compress_hook());
  add("bf16", data_parallel::bf16_compress_hook());
  add("power_sgd", data_parallel::PowerSgd({.rank = 2, .start_iteration = 1}).hook());
}

void measure() {
  const char* const host = std::getenv("BENCH_HOST");  // both namespaces have the kernel's boot id
  bench::Rank rank({.group = {.backend = collective::BackendKind::kNetwork},
                    .address = std::string("tls:") + host + ":1",
                    .host_id = host,
                    .tls = true});
  if (collective::has_gloo()) {  // pip's LibTorch has no headers of it
    rank.add_peer("gloo", collective::connect_gloo(rank.link(), rank.group().ranks(),
                                                   {.timeout = std::chrono::seconds(60)}));
  }
  rank.measure([&](bench::Bench& bench) {
    for (const bench::TensorSize& size : std::getenv(kSlow) != nullptr ? kSlowSizes : kSizes) {
      const at::Tensor mine = at::zeros({size.bytes / 4});
      std::string peer;
      for (const auto& [name, engine] : rank.peers()) {
        peer = name + "/all_reduce/" + size.name;
        bench.add(peer, size.repeats,
                  [mine, gloo = engine.get()] { gloo->all_reduce(mine, collective::kSum); });
      }
      bench.add("collective/all_reduce/" + size.name + "/hosts/gloo", size.repeats,
                [mine, &rank] { rank.group().all_reduce(mine, collective::kSum).wait(); }, {.peer = peer});
    }
    add_steps(bench, rank.group());
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
template <class Network>
bool start_ranks(const Network& network) {
  if (!network.trouble().empty()) {
    std::fprintf(stderr, "bench_hosts: nothing is measured: no two hosts: %s\n", network.trouble().c_str());
    bench::print_section(nlohmann::json::array());
    return true;
  }
  return bench::with_job(Network::kNear, "29418", [&] {
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    setenv("LOCAL_RANK", "0", 1);
    const pid_t near = start_rank(network.near, 0, Network::kNear);
    const pid_t far = start_rank(network.far, 1, Network::kFar);
    const bool near_well = bench::ends_well(near), far_well = bench::ends_well(far);
    return near_well && far_well;
  });
}

bool start_ranks(int count, char** values) {
  std::optional<LinkQuality> link;
  for (int i = 1; i < count; i += 2) {
    const std::string option = values[i];
    if (i + 1 >= count || !bench::read_link_option(option, values[i + 1], link))
      throw std::invalid_argument("'" + option + "': the options are " + bench::kSlowLinkOptions);
  }
  if (!link) return start_ranks(TestNetwork());
  setenv(kSlow, "1", 1);
  return start_ranks(SlowNetwork(*link));
}

}  // namespace
}  // namespace torchspan

int main(int count, char** values) {
  try {
    if (std::getenv("RANK") == nullptr) return torchspan::start_ranks(count, values) ? 0 : 1;
    torchspan::measure();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_hosts: %s\n", error.what());
    return 1;
  }
}
