// Operations with a root, all_gather_into_tensor, and bitwise reductions.
#include <array>
#include <gmock/gmock.h>
#include <optional>
#include <set>

#include <ATen/ATen.h>

#include "core/api/step_part.h"
#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"

namespace torchspan::testing::collective_rooted {
namespace {

using namespace collective;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CollectiveRooted : public CollectiveSuite {};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveRooted, ::testing::ValuesIn(collective_rows()), row_name);

// peer: c10d `testGatherCPU`, `testGatherBasics`: same, any shapes
TEST_P(CollectiveRooted, GathersToEveryRoot) {
  run([&](Group& group) {
    for (int root = 0; root < ranks(); ++root) {
      for (const std::int64_t unit : {0L, 3L, 100001L}) {
        if (unit == 100001 && !is_outer(root)) continue;
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < ranks(); ++rank) {
          inputs.push_back(random_inputs(1, {unit * (rank + 1), 2}, at::kFloat, rank + unit)[0]);
        }
        const auto results = group.gather(inputs[group.rank()], root).wait();
        ASSERT_EQ(results.size(), group.rank() == root ? inputs.size() : 0U);
        for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(same_bits(results[i], inputs[i]));
      }
    }
  });
}

// peer: c10d `testScatterCPU`, `testScatterBasics`: same
TEST_P(CollectiveRooted, ScattersFromEveryRootInPlace) {
  run([&](Group& group) {
    for (int root = 0; root < ranks(); ++root) {
      for (const std::int64_t unit : {0L, 5L, 60001L}) {
        if (unit == 60001 && !is_outer(root)) continue;
        const auto part = [&](int rank) {
          return random_inputs(1, {unit * (rank + 1)}, at::kInt, rank + 10 * root)[0];
        };
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < ranks() && group.rank() == root; ++rank) parts.push_back(part(rank));
        at::Tensor output = at::zeros_like(part(group.rank()));
        EXPECT_TRUE(group.scatter(output, parts, root).wait().is_same(output));
        EXPECT_TRUE(same_bits(output, part(group.rank())));
      }
    }
  });
}

// peer: c10d `testReduceCPU`, `testReduceBasics`: better: the tensors of other ranks keep their values
TEST_P(CollectiveRooted, ReducesToEveryRoot) {
  run([&](Group& group) {
    for (int root = 0; root < ranks(); ++root) {
      for (const std::int64_t length : {0L, 1L, 4001L, 200007L}) {
        const bool large = length == 200007;
        if (large && !is_outer(root)) continue;
        const SharedInputs inputs = inputs_of_ranks({length}, at::kDouble, root + 3);
        for (const ReduceOp reduction : {kSum, kAvg, kMax, kProduct}) {
          if (large && reduction != (root == 0 ? kSum : kMax)) continue;
          at::Tensor mine = inputs[group.rank()].clone(), own = mine.clone();
          if (large) mine = group.allocate({length}, at::kDouble).copy_(mine);
          at::Tensor other = at::stack({mine, mine}, 1).select(1, root % 2);  // strided
          EXPECT_TRUE(group.reduce(mine, root, reduction).wait().is_same(mine));
          EXPECT_TRUE(group.reduce(other, root, reduction).wait().is_same(other));
          const at::Tensor wanted = group.rank() == root ? inputs.reduced(reduction) : inputs[group.rank()];
          EXPECT_TRUE(is_right(mine, wanted)) << length << " to rank " << root;
          EXPECT_TRUE(same_bits(mine, other));
          if (large) {  // a small one was not in the group's memory
            group.reduce(own, root, reduction).wait();
            EXPECT_TRUE(same_bits(mine, own));
          }
          if (group.rank() != root) {
            EXPECT_TRUE(same_bits(mine, wanted)) << "only the root's tensor changes";
          }
        }
      }
    }
  });
}

// peer: c10d `test_all_gather_into_tensor_{cat,stack}_gloo`: same
TEST_P(CollectiveRooted, GathersIntoOneTensor) {
  run([&](Group& group) {
    for (const std::int64_t rows : {1L, 7L, 50001L}) {
      const SharedInputs inputs = inputs_of_ranks({rows, 3}, at::kFloat, rows);
      const at::Tensor cat = at::cat(inputs.all()), stack = cat.view({ranks(), rows, 3});
      at::Tensor joined = at::zeros({rows * ranks(), 3}), stacked = at::zeros({ranks(), rows, 3});
      EXPECT_TRUE(group.all_gather_into_tensor(joined, inputs[group.rank()]).wait().is_same(joined));
      group.all_gather_into_tensor(stacked, inputs[group.rank()]).wait();
      EXPECT_TRUE(same_bits(joined, cat));
      EXPECT_TRUE(same_bits(stacked, stack));
      at::Tensor strided = at::zeros({3, rows * ranks()}).t();
      group.all_gather_into_tensor(strided, inputs[group.rank()]).wait();
      EXPECT_TRUE(same_bits(strided.contiguous(), cat));
      // From this rank's part of the output, in memory of its own and in the group's.
      for (const at::Tensor& whole :
           {at::zeros({ranks(), rows, 3}), group.allocate({ranks(), rows, 3}, at::kFloat).zero_()}) {
        whole[group.rank()].copy_(inputs[group.rank()]);
        group.all_gather_into_tensor(whole, whole[group.rank()]).wait();
        EXPECT_TRUE(same_bits(whole, stack));
        const at::Tensor other = at::zeros_like(whole);
        group.all_gather_into_tensor(other, whole[group.rank()]).wait();
        EXPECT_TRUE(same_bits(other, stack));
      }
    }
    EXPECT_THROW(static_cast<void>(group.all_gather_into_tensor(at::zeros({ranks() + 1, 2}), at::ones({2}))),
                 Error);
    EXPECT_THROW(
        static_cast<void>(group.all_gather_into_tensor(at::zeros({ranks(), 2}, at::kInt), at::ones({2}))),
        Error);
  });
}

// peer: c10d `test_reduce_scatter_tensor`: same
TEST_P(CollectiveRooted, ReduceScatterWritesTheResultToAGivenTensor) {
  run([&](Group& group) {
    for (const std::int64_t rows : {1L, 7L, 50001L}) {
      for (const auto dtype : {at::kFloat, at::kLong, at::kBFloat16}) {
        const SharedInputs inputs = inputs_of_ranks({rows * ranks(), 3}, dtype, rows);
        const auto part_of = [&](const at::Tensor& whole) {
          return whole.narrow(0, rows * group.rank(), rows);
        };
        const at::Tensor wanted = group.reduce_scatter(inputs[group.rank()].clone()).wait();
        const at::Tensor output = at::zeros({rows, 3}, dtype), flat = at::zeros({rows * 3}, dtype);
        EXPECT_TRUE(group.reduce_scatter_tensor(output, inputs[group.rank()]).wait().is_same(output));
        group.reduce_scatter_tensor(flat, inputs[group.rank()]).wait();
        const at::Tensor strided = at::zeros({3, rows}, dtype).t();
        group.reduce_scatter_tensor(strided, inputs[group.rank()]).wait();
        EXPECT_TRUE(same_bits(output, wanted));
        EXPECT_TRUE(same_bits(flat.view({rows, 3}), wanted));
        EXPECT_TRUE(same_bits(strided.contiguous(), wanted));
        // To this rank's part of the input, in memory of its own and in the group's; ranks mix the calls.
        for (const at::Tensor& whole :
             {at::zeros({rows * ranks(), 3}, dtype), group.allocate({rows * ranks(), 3}, dtype).zero_()}) {
          whole.copy_(inputs[group.rank()]);
          if (group.rank() % 2 == 0) {
            group.reduce_scatter_tensor(part_of(whole), whole).wait();
            EXPECT_TRUE(same_bits(part_of(whole).contiguous(), wanted));
          } else {
            EXPECT_TRUE(same_bits(group.reduce_scatter(whole).wait(), wanted));
          }
        }
      }
    }
    EXPECT_THROW(static_cast<void>(group.reduce_scatter_tensor(at::zeros({3}), at::ones({ranks(), 2}))),
                 Error);
    EXPECT_THROW(
        static_cast<void>(group.reduce_scatter_tensor(at::zeros({2}, at::kInt), at::ones({ranks(), 2}))),
        Error);
  });
}

TEST_P(CollectiveRooted, GathersOnlyTensorsOfOneShapeIntoOneTensor) {
  if (ranks() == 1) return;
  run([&](Group& group) {
    for (const std::int64_t base : {2L, 30000L}) {
      const std::int64_t rows = base + (group.rank() == 1 ? 1 : 0);
      const at::Tensor output = at::zeros({rows * ranks(), 3});
      try {
        group.all_gather_into_tensor(output, at::ones({rows, 3})).wait();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), HasSubstr("needs tensors of one shape"));
      }
      EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
    }
  });
}

// peer: c10d `testAllReduceBasics` with BAND, BOR and BXOR: same
TEST_P(CollectiveRooted, CombinesTheBitsOfIntegers) {
  run([&](Group& group) {
    for (const at::ScalarType dtype : {at::kByte, at::kInt, at::kLong, at::kBool}) {
      for (const ReduceOp reduction : {kBitAnd, kBitOr, kBitXor}) {
        for (const std::int64_t length : {5L, 70001L}) {
          const SharedInputs inputs = inputs_of_ranks({length}, dtype, length);
          at::Tensor mine = inputs[group.rank()].clone();
          group.all_reduce(mine, reduction).wait();
          EXPECT_TRUE(same_bits(mine, inputs.reduced(reduction)))
              << to_string(reduction) << " of " << c10::toString(dtype);
        }
      }
    }
    EXPECT_THROW(static_cast<void>(group.all_reduce(at::ones({2}), kBitAnd)), Error);
  });
}

TEST_P(CollectiveRooted, RejectsInvalidArgumentsAndContinues) {
  run([&](Group& group) {
    const at::Tensor one = at::ones({1});
    const std::vector<at::Tensor> parts(ranks(), one);
    EXPECT_THROW(static_cast<void>(group.gather(one, ranks())), Error);
    EXPECT_THROW(static_cast<void>(group.reduce(one, -1)), Error);
    EXPECT_THROW(static_cast<void>(
                     group.scatter(one.clone(), group.rank() == 0 ? std::vector<at::Tensor>() : parts, 0)),
                 Error);
    EXPECT_THROW(static_cast<void>(group.scatter(at::ones({1}, at::kInt), parts, group.rank())), Error);
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST_P(CollectiveRooted, NamesRanksThatChoseDifferentRoots) {
  if (ranks() == 1) return;
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         Group group = make_group_of_suite(self.runtime, self.membership, options());
         std::exception_ptr failure;
         try {
           group.gather(at::ones({2}), self.rank == 1 ? 1 : 0).wait();
         } catch (...) {
           failure = std::current_exception();
         }
         self.membership.barrier("test.end", {}, world_.executor().deadline_in(std::chrono::seconds(60)));
         if (failure) std::rethrow_exception(failure);
       })) {
    ASSERT_TRUE(failure);
    EXPECT_EQ(to_error(failure).kind(), ErrorKind::kInvalid);
    EXPECT_THAT(to_error(failure).what(), AllOf(HasSubstr("worker0"), HasSubstr("gather(Float, to rank 0)"),
                                                HasSubstr("worker1"), HasSubstr("gather(Float, to rank 1)")));
  }
}

TEST(CollectiveSpans, ATracedRunRecordsEveryOperation) {
  if (mpi_place()) return;
  CollectiveWorld world(2);
  for (const auto& failure : world.try_each([](CollectiveWorld::Rank self) {
         self.runtime.spans.set_traced(4096);
         std::optional<Group> group = Group::make(self.runtime, self.membership);
         const at::Tensor one = at::ones({2}), two = at::ones({4});
         const std::vector<at::Tensor> all(2, one);
         group->all_reduce(one.clone()).wait();
         group->reduce_scatter(one).wait();
         group->reduce_scatter_tensor(at::zeros({1}), one).wait();
         group->all_gather(one).wait();
         group->broadcast(one.clone(), 0).wait();
         group->all_to_all(all).wait();
         group->all_gather_into_tensor(two.clone(), one).wait();
         group->gather(one, 0).wait();
         group->scatter(one.clone(), self.rank == 0 ? all : std::vector<at::Tensor>(), 0).wait();
         group->reduce(one.clone(), 0).wait();
         all_reduce_coalesced(*group, {one.clone()}).wait();
         reduce_scatter_coalesced(*group, {one}).wait();
         all_gather_into_tensor_coalesced(*group, {two.clone()}, {one}).wait();
         if (self.rank == 0) group->send(one, 1).wait();
         if (self.rank == 1) group->recv(one.clone(), 0).wait();
         group->barrier();
         group.reset();  // the last callbacks have run
         std::vector<std::string> names;
         for (const SpanRecord& span : self.runtime.spans.snapshot()) {
           if (span.kind == SpanKind::kCollective) names.push_back(span.name);
         }
         EXPECT_THAT(names,
                     ::testing::UnorderedElementsAre(
                         "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "broadcast",
                         "all_to_all", "all_gather_into_tensor", "gather", "scatter", "reduce",
                         "all_reduce_coalesced", "reduce_scatter_coalesced",
                         "all_gather_into_tensor_coalesced", self.rank == 0 ? "send" : "recv", "barrier"));
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

// torchspan stacks and top keep the operations of two groups of the same ranks apart by these numbers.
TEST(CollectiveSpans, GroupsOfTheSameRanksHaveNumbersOfTheirOwnThatAllRanksShare) {
  if (mpi_place()) return;
  CollectiveWorld world(2);
  std::array<std::vector<std::int32_t>, 2> numbers;
  for (const auto& failure : world.try_each([&](CollectiveWorld::Rank self) {
         self.runtime.spans.set_traced(4096);
         const Group first = Group::make(self.runtime, self.membership);
         const Group second = Group::make(self.runtime, self.membership), part = first.split(0, self.rank);
         for (const Group& group : {first, second, part, part.split(0, self.rank)}) group.barrier();
         for (const SpanRecord& span : self.runtime.spans.snapshot()) {
           if (span.kind != SpanKind::kCollective || span.name != "barrier") continue;
           numbers.at(static_cast<std::size_t>(self.rank)).push_back(span.link.part);
           EXPECT_TRUE(has_ranks(span.link.part, first.ranks()));
         }
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
  EXPECT_EQ(numbers[0], numbers[1]);
  EXPECT_EQ(numbers[0].size(), 4u);
  EXPECT_GE(std::set<std::int32_t>(numbers[0].begin(), numbers[0].end()).size(),
            2u);  // eight bits of some may be equal
}

}  // namespace
}  // namespace torchspan::testing::collective_rooted
