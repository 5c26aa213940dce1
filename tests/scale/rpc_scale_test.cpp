// What whole workers cost in large worlds: backward passes and the two ways to end a world.
#include <atomic>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/autograd.h>

#include "tests/parity/autograd_world.h"
#include "tests/scale/measurements.h"

namespace torchspan::testing::scale::rpc_scale_test {
namespace {

using std::chrono::seconds;
/// A worker of a simulated cluster takes at least four operating-system threads.
constexpr int kMostWorkers = 1024;
constexpr std::int64_t kHops = 64;

at::Tensor hop(Worker& worker, const at::Tensor& x, std::int64_t left);
at::Tensor twice(const at::Tensor& x) { return x * 2; }
constexpr Function<hop> kHop{"hop"};
constexpr Function<twice> kTwice{"twice"};
/// Passes the tensor on through `left` more workers.
at::Tensor hop(Worker& worker, const at::Tensor& x, std::int64_t left) {
  const at::Tensor mine = x * 2;
  if (left == 0) return mine;
  return worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kHop, mine, left - 1) / 2;
}

struct Cost {
  Traffic::Counts counts;
  Duration time{};
};

/// The backward pass of `forward`, which rank 0 runs, and the end of its context, once all have connected.
Cost cost_of_pass(int workers, const std::function<at::Tensor(Worker&, const at::Tensor&)>& forward) {
  FunctionTable functions;
  functions.add(kHop, kTwice);
  ClusterOptions options = autograd_world(workers, std::move(functions));
  options.threads = 2;
  SimCluster cluster(std::move(options));
  Traffic traffic(cluster.network());
  Cost cost;
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    for (int round = 0; round < 2; ++round) {  // the first one opens the connections
      const at::Tensor x = at::ones({16}).set_requires_grad(true);
      Context context(worker);
      const at::Tensor loss = forward(worker, x).sum();
      traffic.take();
      const TimePoint began = now(worker);
      context.backward(loss);
      cost.time = now(worker) - began;
      cost.counts = traffic.take();
      EXPECT_GT(context.gradient(x).sum().item<float>(), 0);
    }
  });
  return cost;
}

std::vector<int> sizes() { return world_sizes(kMostWorkers); }

TEST(PassScale, AChainOf64HopsCostsTheSameInEveryWorld) {
  double first = 0;
  for (const int workers : sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    const Cost cost = cost_of_pass(
        workers, [](Worker& worker, const at::Tensor& x) { return worker.rpc_sync(1, kHop, x, kHops - 1); });
    record("pass over 64 hops", workers,
           {{"messages_per_hop", cost.counts.direct_messages / kHops},
            {"bytes_per_hop", cost.counts.direct_bytes / kHops},
            {"microseconds", microseconds_of(cost.time)}});
    if (first == 0) first = cost.counts.direct_messages;
    // A chain in a world of 64 visits one worker twice.
    EXPECT_NEAR(cost.counts.direct_messages, first, 8) << "workers outside the pass get no message";
    EXPECT_LE(cost.counts.direct_messages, 12 * kHops);
  }
}

TEST(PassScale, TheCostOfAChainGrowsWithItsHops) {
  const int workers = sizes().front();
  std::vector<double> messages;
  for (const std::int64_t hops : {8, 16, 32, 64}) {
    const Cost cost = cost_of_pass(
        workers, [=](Worker& worker, const at::Tensor& x) { return worker.rpc_sync(1, kHop, x, hops - 1); });
    record("pass by hops", static_cast<int>(hops),
           {{"messages", cost.counts.direct_messages},
            {"bytes", cost.counts.direct_bytes},
            {"microseconds", microseconds_of(cost.time)}});
    messages.push_back(cost.counts.direct_messages / static_cast<double>(hops));
  }
  for (const double per_hop : messages) EXPECT_NEAR(per_hop, messages.front(), 2);
}

TEST(PassScale, APassOverAllWorkersCostsEachTheSame) {
  double first = 0;
  for (const int workers : sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    const Cost cost = cost_of_pass(workers, [](Worker& worker, const at::Tensor& x) {
      std::vector<Future<at::Tensor>> parts;
      for (std::uint32_t rank = 1; rank < static_cast<std::uint32_t>(worker.world_size()); ++rank) {
        parts.push_back(worker.rpc_async(rank, kTwice, x));
      }
      at::Tensor sum = x;
      for (const auto& part : parts) sum = sum + part.wait();
      return sum;
    });
    const double per_worker = cost.counts.direct_messages / workers;
    record("pass over all", workers,
           {{"messages_per_worker", per_worker},
            {"bytes_per_worker", cost.counts.direct_bytes / workers},
            {"microseconds", microseconds_of(cost.time)}});
    if (first == 0) first = per_worker;
    EXPECT_NEAR(per_worker, first, 0.5);
  }
}

TEST(WorkerScale, AGracefulShutdownCostsEachWorkerTheSame) {
  for (const int workers : sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    ClusterOptions options = world_of(workers);
    options.threads = 1;
    SimCluster cluster(std::move(options));
    Traffic traffic(cluster.network());
    std::vector<std::exception_ptr> failures;
    std::atomic<int> started{0};
    TimePoint began, ended;
    failures = cluster.try_services([&](rpc::WorkerService& service) {
      Worker& worker = service.worker();
      worker.barrier();
      if (++started == workers) {
        traffic.take();
        began = now(worker);
      }
      service.shutdown(cluster.executor().deadline_in(seconds(600)));
      ended = std::max(ended, now(worker));
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure);
    const Traffic::Counts counts = traffic.take();
    record("worker shutdown", workers,
           {{"messages_per_worker", counts.messages / workers},
            {"bytes_per_worker", counts.bytes / workers},
            {"microseconds", microseconds_of(ended - began)}});
    EXPECT_LE(counts.messages, 16 * workers);
    EXPECT_LE(counts.bytes, 1000 * workers);
  }
}

}  // namespace
}  // namespace torchspan::testing::scale::rpc_scale_test
