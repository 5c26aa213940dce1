#include <algorithm>
#include <atomic>
#include <cmath>
#include <gmock/gmock.h>
#include <limits>

#include <ATen/ATen.h>

#include <torchspan/core/future.h>

#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"
#include "tests/conformance/collective_process.h"

namespace torchspan::testing::collective_groups {
namespace {

using namespace collective;

class CollectiveGroups : public CollectiveSuite {};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveGroups, ::testing::ValuesIn(collective_rows()), row_name);

// peer: c10d Horovod's `allreduce_async_fused`, `grouped_*`: same: operations are asynchronous; buckets fuse
//   them
TEST_P(CollectiveGroups, KeepsManyOperationsOfAllSizesInFlight) {
  run([&](Group& group) {
    std::vector<at::Tensor> mine;
    std::vector<Future<at::Tensor>> pending;
    for (int i = 0; i < 60; ++i) {
      const std::int64_t length = i % 12 == 0 ? 200000 + i : i % 3 == 0 ? 30000 + i : 10 + i;
      mine.push_back(at::full({length}, group.rank() + i, at::kLong));
      pending.push_back(group.all_reduce(mine.back()));
    }
    for (int i = 59; i >= 0; --i) {
      pending[i].wait();
      const std::int64_t sum = ranks() * i + ranks() * (ranks() - 1) / 2;
      EXPECT_TRUE((mine[i] == sum).all().item<bool>()) << i;
    }
  });
}

// peer: c10d Horovod's allreduce_async_fused
TEST_P(CollectiveGroups, CompletesOperationsThatAreNotAwaited) {
  run([&](Group& group) {
    std::vector<Future<int>> done;
    std::atomic<int> sum{0};
    for (int i = 0; i < 20; ++i) {
      done.push_back(
          group.all_reduce(at::ones({i % 2 == 0 ? 3 : 100000})).then([&](Future<at::Tensor> result) {
            sum += result.wait()[0].item<int>();
            return 0;
          }));
    }
    wait_all(done, std::chrono::seconds(60));
    EXPECT_EQ(sum.load(), 20 * ranks());
  });
}

/// The group's own thread cannot join itself: it ends with the runtime, not with the process.
TEST_P(CollectiveGroups, MayLoseItsLastHandleInAContinuation) {
  const auto failures = world_.try_each([&](CollectiveWorld::Rank self) {
    auto held = std::make_unique<Group>(make_group_of_suite(self.runtime, self.membership, options()));
    Group& group = *held;
    const auto sum = group.all_reduce(at::ones({1000}));
    const Future<int> done = sum.then([held = std::move(held)](const Future<at::Tensor>& result) mutable {
      held.reset();
      return result.wait()[0].item<int>();
    });
    EXPECT_EQ(done.wait(std::chrono::seconds(60)), ranks());
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

// peer: c10d subgroups, `new_group`: same
TEST_P(CollectiveGroups, SplitsByColorAndKey) {
  run([&](Group& group) {
    const int color = group.rank() % 2;
    const Group part = group.split(color, /*key=*/-group.rank());
    std::vector<int> expected;
    for (int rank = ranks() - 1; rank >= 0; --rank) {
      if (rank % 2 == color) expected.push_back(rank);
    }
    EXPECT_EQ(part.ranks(), expected);
    EXPECT_EQ(part.ranks()[part.rank()], group.rank());
    at::Tensor small = at::full({3}, group.rank()), large = at::full({300000}, group.rank());
    at::Tensor bucket = part.allocate({100000}, at::kFloat);
    bucket.fill_(group.rank());
    const auto waits = {part.all_reduce(small), group.all_reduce(large), part.all_reduce(bucket)};
    for (const auto& future : waits) future.wait();
    float sum = 0;
    for (const int rank : expected) sum += static_cast<float>(rank);
    EXPECT_TRUE((small == sum).all().item<bool>());
    EXPECT_TRUE((bucket == sum).all().item<bool>());
    EXPECT_TRUE((large == ranks() * (ranks() - 1) / 2).all().item<bool>());
  });
}

/// Ranks may split two groups in different orders: each of two threads splits one.
TEST_P(CollectiveGroups, SplitInSeveralThreadsAtOnceKeepTheirRanks) {
  const auto failures = world_.try_each([&](CollectiveWorld::Rank self) {
    std::vector<Group> groups;
    for (int i = 0; i < 2; ++i)
      groups.push_back(make_group_of_suite(self.runtime, self.membership, options()));
    for (int round = 0; round < 3; ++round) {
      std::vector<int> sums(2);
      std::vector<Thread> threads;
      for (int turn = 0; turn < 2; ++turn) {
        const int i = (turn + self.rank) % 2;
        threads.push_back(self.runtime.executor.spawn("splits", [&, i] {
          const Group part = groups[static_cast<std::size_t>(i)].split(0, self.rank);
          sums[static_cast<std::size_t>(i)] = part.all_reduce(at::full({1}, 1 + i)).wait().item<int>();
        }));
        self.runtime.executor.sleep(std::chrono::milliseconds(3));
      }
      for (Thread& thread : threads) thread.join();
      EXPECT_EQ(sums, (std::vector<int>{ranks(), 2 * ranks()}));
    }
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

TEST_P(CollectiveGroups, AddsSparseHalvesInFloat) {
  run([&](Group& group) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      for (const ReduceOp reduction : {kSum, kAvg}) {
        const double large = dtype == at::kHalf ? 2048 : 256;
        const at::Tensor values = at::full({1}, group.rank() == 0 ? large : 1, dtype);
        const at::Tensor sparse = at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), values, {1});
        const at::Tensor expected = group.all_reduce(values.clone(), reduction).wait();
        const at::Tensor sum = group.all_reduce(sparse, reduction).wait();
        EXPECT_EQ(sum.scalar_type(), dtype);
        EXPECT_TRUE(at::equal(sum.to_dense(), expected)) << sum.to_dense() << expected;
      }
    }
    EXPECT_THROW(group.all_reduce(at::ones({2}).to_sparse(), kMin).wait(), Error);
  });
}

// peer: c10d sparse all-reduce: same
TEST_P(CollectiveGroups, SumsSparseTensorsWithDifferentCounts) {
  run([&](Group& group) {
    for (const std::int64_t unit : {0L, 1L, 400L}) {
      for (const ReduceOp reduction : {kSum, kAvg}) {
        std::vector<at::Tensor> inputs;
        at::Tensor sum = at::zeros({50, 70, 4}, at::kDouble);
        for (int rank = 0; rank < ranks(); ++rank) {
          const std::int64_t entries = unit * rank;
          auto generator = at::detail::createCPUGenerator(unit + rank);
          const at::Tensor indices = at::stack({at::randint(50, {entries}, generator, at::kLong),
                                                at::randint(70, {entries}, generator, at::kLong)});
          // Whole numbers, whose sum does not depend on the order.
          const at::Tensor values = at::randint(-50, 50, {entries, 4}, generator, at::kDouble);
          inputs.push_back(at::sparse_coo_tensor(indices, values, {50, 70, 4}));
          sum += inputs.back().to_dense();
        }
        if (reduction == kAvg) sum = sum / ranks();
        const at::Tensor result = group.all_reduce(inputs[group.rank()], reduction).wait();
        EXPECT_TRUE(result.is_sparse() && result.is_coalesced());
        EXPECT_TRUE(is_right(result.to_dense(), sum)) << unit;
        const auto all = group.all_gather(result.values()).wait();
        for (const at::Tensor& values : all) EXPECT_TRUE(same_bits(values, result.values()));
      }
    }
  });
}

/// A rank without entries for an embedding does not know how many sparse dimensions the others' gradients
/// have.
TEST_P(CollectiveGroups, SumsSparseTensorsOfWhichSomeAreEmptyInOtherDimensions) {
  run([&](Group& group) {
    const auto empty = [](std::int64_t sparse_dim) {
      std::vector<std::int64_t> values{5, 3};
      values.erase(values.begin(), values.begin() + sparse_dim);
      values.insert(values.begin(), 0);
      return at::sparse_coo_tensor(at::empty({sparse_dim, 0}, at::kLong), at::empty(values), {5, 3});
    };
    const at::Tensor rows = at::sparse_coo_tensor(at::tensor({1L, 4L}).view({1, 2}), at::ones({2, 3}),
                                                  {5, 3});  // like those of an embedding
    const at::Tensor places =
        at::sparse_coo_tensor(at::tensor({1L, 4L, 0L, 2L}).view({2, 2}), at::ones({2}), {5, 3});
    for (const at::Tensor& tensor : {rows, places}) {
      for (int owner = 0; owner < ranks(); ++owner) {
        const at::Tensor mine = group.rank() == owner ? tensor : empty(1 + group.rank() % 2);
        const at::Tensor sum = group.all_reduce(mine).wait();
        EXPECT_EQ(sum.sparse_dim(), tensor.sparse_dim()) << "that of rank " << owner;
        EXPECT_TRUE(same_bits(sum.to_dense(), tensor.to_dense())) << "that of rank " << owner;
      }
    }
    const at::Tensor nothing = group.all_reduce(empty(1 + group.rank() % 2), kAvg).wait();
    EXPECT_EQ(nothing.sizes(), at::IntArrayRef({5, 3}));
    EXPECT_EQ(nothing._nnz(), 0);
  });
}

/// Such memory has no address here: reading or writing it would end the process.
TEST_P(CollectiveGroups, RefusesTensorsOfOtherDevicesAndGoesOn) {
  run([&](Group& group) {
    const at::Tensor meta = at::empty({ranks(), 2}, at::TensorOptions().device(at::kMeta));
    const auto refused = [](const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
        EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("on meta"),
                                                   ::testing::HasSubstr("a meta tensor has no values")));
      }
    };
    refused([&] { static_cast<void>(group.all_reduce(meta)); });
    refused([&] { static_cast<void>(group.reduce_scatter(meta)); });
    refused([&] { static_cast<void>(group.all_gather(meta)); });
    refused([&] { static_cast<void>(group.broadcast(meta, 0)); });
    std::vector<at::Tensor> parts(ranks(), at::ones({2}));
    parts.back() = meta;
    refused([&] { static_cast<void>(group.all_to_all(parts)); });
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST_P(CollectiveGroups, GivesAllRanksTheSameBits) {
  run([&](Group& group) {
    for (const std::int64_t length : {11L, 30000L, 300007L}) {
      at::Tensor mine = inputs_of_ranks({length}, at::kFloat, length)[group.rank()] * 1e3;
      group.all_reduce(mine).wait();
      for (const at::Tensor& other : group.all_gather(mine).wait()) EXPECT_TRUE(same_bits(other, mine));
    }
  });
}

// peer: c10d subgroups
TEST_P(CollectiveGroups, WorksBesideGroupsWithOtherRankOrders) {
  const auto failures = world_.try_each([&](CollectiveWorld::Rank self) {
    GroupOptions backwards = options();
    for (int rank = ranks() - 1; rank >= 0; --rank) backwards.ranks.push_back(rank);
    const Group first = make_group_of_suite(self.runtime, self.membership, options());
    const Group second = make_group_of_suite(self.runtime, self.membership, backwards);
    EXPECT_EQ(second.rank(), ranks() - 1 - self.rank);
    at::Tensor a = at::full({50000}, self.rank), b = at::full({50000}, 2 * self.rank);
    const auto fa = first.all_reduce(a), fb = second.all_reduce(b);
    fb.wait();
    fa.wait();
    EXPECT_TRUE(at::equal(2 * a, b));
    at::Tensor c = at::full({2}, self.rank);
    second.broadcast(c, 0).wait();
    EXPECT_EQ(c[0].item<int>(), ranks() - 1);
    second.barrier();
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

TEST_P(CollectiveGroups, CompletesABarrierOnceAllRanksHaveBegunIt) {
  std::atomic<int> begun{0};
  const auto failures = world_.try_each([&](CollectiveWorld::Rank self) {
    const Group group = make_group_of_suite(self.runtime, self.membership, options());
    group.barrier();
    if (self.rank == ranks() - 1)
      self.runtime.executor.make_parker()->park(
          self.runtime.executor.deadline_in(std::chrono::milliseconds(50)));
    ++begun;
    at::Tensor sum = at::ones({3});
    const Future<void> all = group.barrier_async();
    const auto later = group.all_reduce(sum);
    all.wait();
    // Under Open MPI, the other ranks are in other processes.
    EXPECT_EQ(begun.load(), mpi_place() ? 1 : ranks());
    later.wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, ranks())));
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << describe(failure).text;
}

// peer: c10d allreduce_error
TEST_P(CollectiveGroups, RejectsInvalidArgumentsAndContinues) {
  run([&](Group& group) {
    EXPECT_THROW(static_cast<void>(group.all_reduce(at::Tensor())), Error);
    EXPECT_THROW(static_cast<void>(group.broadcast(at::ones({1}), ranks())), Error);
    EXPECT_THROW(static_cast<void>(group.broadcast(at::ones({1}), -1)), Error);
    EXPECT_THROW(static_cast<void>(group.all_to_all({})), Error);
    EXPECT_THROW(static_cast<void>(group.reduce_scatter(at::scalar_tensor(1))), Error);
    EXPECT_THROW(group.split(-1, 0), Error);
    EXPECT_THROW(group.allocate({-1}, at::kFloat), Error);
    EXPECT_THROW(Group(nullptr), Error);
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST_P(CollectiveGroups, RefusesTensorsWithoutMemoryOrWithSharedMemoryAndGoesOn) {
  run([&](Group& group) {
    const at::Tensor zero = at::_efficientzerotensor({ranks(), 2}, at::TensorOptions());
    const at::Tensor shared = at::ones({1}).expand({ranks(), 2});
    const at::Tensor good = at::ones({ranks(), 2});
    const auto refused = [&](const char* text, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown for " << text;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.message(), ::testing::HasSubstr(text));
      }
    };
    const auto refused_everywhere = [&](const at::Tensor& tensor, const char* why) {
      refused(why, [&] { static_cast<void>(group.all_reduce(tensor)); });
      refused(why, [&] { static_cast<void>(group.broadcast(tensor, 0)); });
      if (group.rank() == 0 || why == std::string_view("has no memory"))
        refused(why, [&] { static_cast<void>(group.reduce(tensor, 0)); });
      refused(why, [&] { static_cast<void>(group.all_gather_into_tensor(tensor, at::ones({2}))); });
      refused(why, [&] { static_cast<void>(all_reduce_coalesced(group, {good, tensor})); });
    };
    refused_everywhere(zero, "has no memory");
    refused_everywhere(shared, "share memory");
    refused("has no memory", [&] { static_cast<void>(group.all_gather(zero)); });
    refused("has no memory", [&] { static_cast<void>(group.reduce_scatter(zero)); });
    // What is only read may share memory.
    EXPECT_TRUE(at::equal(group.all_gather(shared).wait()[0], good));
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST_P(CollectiveGroups, GivesNaNOfAnyRankInMinimumAndMaximum) {
  run([&](Group& group) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const ReduceOp reduction : {kMin, kMax}) {
        for (const std::int64_t length : {3, 100'000}) {
          // Element i is NaN on rank i, and not on those before it.
          at::Tensor mine = at::full({length}, group.rank(), dtype);
          mine[std::min<std::int64_t>(group.rank(), length - 1)] = std::numeric_limits<double>::quiet_NaN();
          const at::Tensor result = group.all_reduce(mine, reduction).wait();
          for (std::int64_t i = 0; i < 3; ++i)
            EXPECT_EQ(std::isnan(result[i].item<double>()), i < ranks()) << i << " of " << length;
        }
      }
    }
  });
}

TEST_P(CollectiveGroups, DoesNotCollapseWhenRanksTakeTurnsOnACore) {
  run([&](Group& group) {
    at::Tensor mine = at::ones({16}, at::kLong);
    for (int i = 0; i < 100; ++i) {
      mine.fill_(1);
      group.all_reduce(mine).wait();
      ASSERT_EQ(mine[15].item<int>(), ranks());
    }
  });
}

/// Up to four ranks of each host exchange slices of a large tensor; the smallest host says how many.
TEST(CollectiveHosts, SlicesForSeveralRanksOfAHostGiveTheResultsOfOneProcess) {
  if (mpi_place()) return;
  struct Placement {
    int ranks, hosts;
  };
  for (const Placement& placement : {Placement{8, 2}, Placement{7, 3}, Placement{11, 2}, Placement{3, 3}}) {
    SCOPED_TRACE(::testing::Message() << placement.ranks << " ranks on " << placement.hosts << " hosts");
    CollectiveWorld world(placement.ranks, placement.hosts);
    InputsOfRanks inputs_of_ranks;
    world.run(
        [&](Group& group) {
          for (const std::int64_t length : {1000L, 70001L, 300007L, 1300003L}) {
            const SharedInputs inputs = inputs_of_ranks.get(placement.ranks, {length}, at::kLong, length);
            for (const ReduceOp reduction : {kSum, kMax}) {
              if (length == 1300003 && reduction != kSum) continue;  // chunks do not depend on the reduction
              const at::Tensor wanted = inputs.reduced(reduction), mine = inputs[group.rank()].clone();
              EXPECT_TRUE(same_bits(group.all_reduce(mine, reduction).wait(), wanted)) << length;
              const int root = static_cast<int>(length) % placement.ranks;
              const at::Tensor again = group.reduce(inputs[group.rank()].clone(), root, reduction).wait();
              EXPECT_TRUE(same_bits(again, group.rank() == root ? wanted : inputs[group.rank()])) << length;
            }
          }
        },
        {.backend = BackendKind::kHierarchical});
  }
}

#if !defined(TORCHSPAN_GLOO)
TEST(CollectivesWithoutGloo, SayWhatToDo) {
  CollectiveWorld world(2);
  expect_error(ErrorKind::kUnsupported, {"no Gloo", "use another backend"},
               [&] { world.run([](Group&) {}, {.backend = BackendKind::kC10d}); });
}
#endif

}  // namespace
}  // namespace torchspan::testing::collective_groups
