// Every operation of groups whose hosts have the same numbers of ranks, different ones, and ranks in turn.
#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>

#include <ATen/ATen.h>

#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"

namespace torchspan::testing::collective_topologies {
namespace {

using namespace collective;
using std::chrono::seconds;

struct Topology {
  std::string name;
  std::vector<int> hosts;  ///< by rank
};

class CollectiveTopologies : public ::testing::TestWithParam<Topology> {
 protected:
  int ranks() const { return static_cast<int>(GetParam().hosts.size()); }
  SharedInputs inputs_of_ranks(std::int64_t length) {
    return inputs_.get(ranks(), {length * ranks()}, at::kLong, static_cast<std::uint64_t>(length));
  }

  void run(BackendKind backend, const std::function<void(const Group&)>& body) {
    if (mpi_place()) return;
    CollectiveWorld world(ranks());
    world.place(GetParam().hosts);
    world.run(
        [&](Group& group) {
          body(group);
          group.barrier();
        },
        {.backend = backend});
  }

 private:
  InputsOfRanks inputs_;
};
INSTANTIATE_TEST_SUITE_P(
    Hosts, CollectiveTopologies,
    ::testing::Values(Topology{"2x4", {0, 0, 0, 0, 1, 1, 1, 1}}, Topology{"3x2", {0, 0, 1, 1, 2, 2}},
                      Topology{"2x3InTurn", {0, 1, 0, 1, 0, 1}}, Topology{"1And3And2", {0, 1, 1, 1, 2, 2}},
                      Topology{"5And1", {0, 0, 0, 0, 0, 1}}, Topology{"UnevenInTurn", {1, 0, 2, 0, 1, 0, 0}}),
    [](const auto& info) { return "Of" + info.param.name; });

/// Sums, gathers, scatters and exchanges of integers, against one process.
void expect_results_of_one_process(const Group& group, std::int64_t length, const SharedInputs& inputs) {
  const int ranks = group.size(), rank = group.rank();
  const auto part = [&](const at::Tensor& whole, int of) { return whole.narrow(0, of * length, length); };
  const at::Tensor sum = inputs.reduced(kSum);
  const at::Tensor& mine = inputs[rank];
  EXPECT_TRUE(same_bits(group.all_reduce(mine.clone()).wait(), sum));
  EXPECT_TRUE(same_bits(group.reduce_scatter(mine.clone()).wait(), part(sum, rank)));
  const auto all = group.all_gather(mine).wait();
  const at::Tensor joined =
      group.all_gather_into_tensor(at::zeros({ranks * length * ranks}, at::kLong), mine).wait();
  EXPECT_TRUE(same_bits(joined, at::cat(inputs.all())));
  std::vector<at::Tensor> parts;
  for (int to = 0; to < ranks; ++to) parts.push_back(part(mine, to));
  const auto exchanged = group.all_to_all(parts).wait();
  for (int from = 0; from < ranks; ++from) {
    EXPECT_TRUE(same_bits(all[from], inputs[from]));
    EXPECT_TRUE(same_bits(exchanged[from], part(inputs[from], rank)));
  }
  for (int root = 0; root < ranks; ++root) {
    if (length > 1000 && root != 0 && root != ranks / 2 && root != ranks - 1) continue;
    EXPECT_TRUE(same_bits(group.broadcast(mine.clone(), root).wait(), inputs[root])) << "root " << root;
    const at::Tensor reduced = group.reduce(mine.clone(), root).wait();
    EXPECT_TRUE(same_bits(reduced, root == rank ? sum : mine)) << "root " << root;
    const auto gathered = group.gather(mine, root).wait();
    ASSERT_EQ(gathered.size(), root == rank ? inputs.size() : 0U);
    for (std::size_t from = 0; from < gathered.size(); ++from)
      EXPECT_TRUE(same_bits(gathered[from], inputs[from]));
    const at::Tensor output = at::zeros({length}, at::kLong);
    group.scatter(output, root == rank ? parts : std::vector<at::Tensor>(), root).wait();
    EXPECT_TRUE(same_bits(output, part(inputs[root], rank))) << "root " << root;
  }
  const auto coalesced = all_reduce_coalesced(group, {mine.clone(), part(mine, 0).clone()}).wait();
  EXPECT_TRUE(same_bits(coalesced[0], sum));
  EXPECT_TRUE(same_bits(coalesced[1], part(sum, 0)));
}

TEST_P(CollectiveTopologies, GiveTheResultsOfOneProcess) {
  for (const BackendKind backend : {BackendKind::kHierarchical, BackendKind::kNetwork}) {
    // The network backend treats all hosts alike: one topology of each size suffices.
    if (backend == BackendKind::kNetwork && ranks() == 6 && GetParam().name != "3x2") continue;
    SCOPED_TRACE(name_of(backend));
    run(backend, [&](const Group& group) {
      // The last size has slices for several ranks of a host: up to four of at least 256 KiB.
      for (const std::int64_t length : {0L, 1L, 700L, 40003L})
        expect_results_of_one_process(group, length, inputs_of_ranks(length));
    });
  }
}

TEST_P(CollectiveTopologies, PassMessagesBetweenAllRanksAndSplitAcrossHosts) {
  run(BackendKind::kHierarchical, [&](const Group& group) {
    std::vector<Future<at::Tensor>> sent;
    std::vector<Future<ReceivedMessage>> received;
    for (int other = 0; other < ranks(); ++other) {
      if (other == group.rank()) continue;
      sent.push_back(group.send(at::full({30000}, group.rank(), at::kLong), other));
      received.push_back(group.recv(at::zeros({30000}, at::kLong), kAnySource));
    }
    std::vector<int> sources{group.rank()};
    for (const auto& one : received) {
      const ReceivedMessage message = one.wait(seconds(60));
      EXPECT_TRUE((message.tensor == message.source).all().item<bool>());
      sources.push_back(message.source);
    }
    wait_all(sent, seconds(60));
    std::sort(sources.begin(), sources.end());
    std::vector<int> all(static_cast<std::size_t>(ranks()));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sources, all);
    const Group half = group.split(group.rank() % 2, -group.rank());
    at::Tensor mine = at::full({1000}, group.rank(), at::kLong);
    half.all_reduce(mine).wait();
    int wanted = 0;
    for (int rank = group.rank() % 2; rank < ranks(); rank += 2) wanted += rank;
    EXPECT_TRUE((mine == wanted).all().item<bool>());
  });
}

}  // namespace
}  // namespace torchspan::testing::collective_topologies
