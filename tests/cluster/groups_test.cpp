// Groups beside remote calls, across real processes.
#include <ATen/ATen.h>

#include <torchspan/collective/group.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session/session.h>

#include "tests/support/cluster_main.h"

namespace torchspan {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
constexpr Function<add> kAdd{"add"};

/// Sums over all workers and over part of them, while calls go back and forth.
void sums_and_calls() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kAdd));
  {
    const auto rank = static_cast<std::int64_t>(session.rank());
    const collective::Group group = session.group();
    require(group.rank() == rank && group.size() == 3, "the group is the world");
    require(group.back_end()->name() == "shm",
            "workers of one host share memory, not " + group.back_end()->name());
    const collective::Group odd = group.split(rank == 1 ? 1 : 0, 0);
    const std::string next = "worker" + std::to_string((rank + 1) % 3);
    for (std::int64_t step = 0; step < 50; ++step) {
      auto call = session.worker().rpc_async(next, kAdd, rank, step);
      at::Tensor all = at::full({step % 2 == 0 ? 10 : 100000}, rank + step, at::kLong);
      at::Tensor part = at::full({7}, rank, at::kDouble);
      const auto sum = group.all_reduce(all);
      odd.all_reduce(part).wait();
      sum.wait();
      require((all == 3 * step + 3).all().item<bool>(), "a sum over all");
      require((part == (rank == 1 ? 1 : 2)).all().item<bool>(), "a sum over a part");
      require(call.wait() == rank + step, "a call");
    }
  }
  session.shutdown();
}

TEST(Groups, GoTogetherWithCalls) {
  ProcessWorld world(3);
  world.start_all("sums_and_calls");
  expect_all_end_well(world);
}

/// A group of some workers is no business of the others.
void group_of_some() {
  Session session(WorkerOptions::from_env());
  if (session.rank() != 1) {
    const collective::Group pair = session.group({.ranks = {2, 0}});
    require(pair.rank() == (session.rank() == 2 ? 0 : 1), "ranks stand in the order that was asked for");
    at::Tensor value = at::full({3}, static_cast<double>(session.rank()));
    pair.broadcast(value, 0).wait();
    require((value == 2).all().item<bool>(), "the first rank's value");
  } else {
    try {
      session.group({.ranks = {2, 0}});
      throw std::runtime_error("a stranger was let in");
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kInvalid, error.what());
    }
  }
  session.shutdown();
}

TEST(Groups, MayBeSomeOfTheWorkers) {
  ProcessWorld world(3);
  world.start_all("group_of_some");
  expect_all_end_well(world);
}

TEST(Groups, AWorldOfOneHasAGroupToo) {
  Session session(WorkerOptions{});
  const collective::Group group = session.group();
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.all_reduce(at::ones({2})).wait().sum().item<int>(), 2);
}

}  // namespace
}  // namespace torchspan

int main(int argc, char** argv) {
  using namespace torchspan;
  return torchspan::testing::cluster_main(
      argc, argv, {{"sums_and_calls", sums_and_calls}, {"group_of_some", group_of_some}});
}
