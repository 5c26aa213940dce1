// Operations on several tensors as one.
#include <gmock/gmock.h>

#include <ATen/ATen.h>

#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"

namespace torchspan::testing::collective_coalesced {
namespace {

using namespace collective;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Shapes = std::vector<std::vector<std::int64_t>>;

class CollectiveCoalesced : public CollectiveSuite {
 protected:
  /// inputs[rank][i] has shapes[i].
  std::vector<Tensors> inputs_of(const Shapes& shapes, at::ScalarType dtype) {
    std::vector<Tensors> inputs(static_cast<std::size_t>(ranks()));
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const SharedInputs all = inputs_of_ranks(shapes[i], dtype, 31 * i + 5);
      for (int rank = 0; rank < ranks(); ++rank) inputs[rank].push_back(all[rank]);
    }
    return inputs;
  }
  static Tensors column(const std::vector<Tensors>& inputs, std::size_t i) {
    Tensors column;
    for (const Tensors& of_rank : inputs) column.push_back(of_rank[i]);
    return column;
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveCoalesced, ::testing::ValuesIn(collective_rows()), row_name);

const Shapes kShapes{{3}, {2, 3}, {0}, {}, {1, 5, 1}, {40001}};

// peer: c10d `test_allreduce_coalesced_basics`, `test_allreduce_coalesced_stress`: same, any strides
TEST_P(CollectiveCoalesced, ReducesAllTensorsInPlace) {
  run([&](Group& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kLong}) {
      for (const ReduceOp reduction : {kSum, kMax}) {
        const auto inputs = inputs_of(kShapes, dtype);
        Tensors mine;
        for (const at::Tensor& tensor : inputs[group.rank()]) mine.push_back(tensor.clone());
        mine[1] = mine[1].t().contiguous().t();
        const Tensors results = all_reduce_coalesced(group, mine, reduction).wait();
        ASSERT_EQ(results.size(), mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
          EXPECT_TRUE(results[i].is_same(mine[i]));
          EXPECT_TRUE(is_right(mine[i], reduce_alone(column(inputs, i), reduction))) << i;
        }
      }
    }
    at::Tensor one = at::full({70000}, group.rank());
    all_reduce_coalesced(group, {one}).wait();
    EXPECT_TRUE((one == ranks() * (ranks() - 1) / 2).all().item<bool>());
  });
}

// peer: c10d `reduce_scatter_tensor_coalesced`: same
TEST_P(CollectiveCoalesced, ScattersTheReductionOfEachTensor) {
  run([&](Group& group) {
    const std::int64_t size = ranks();
    const Shapes shapes{{size}, {2 * size, 3}, {0, 2}, {5000 * size}};
    const auto inputs = inputs_of(shapes, at::kDouble);
    const Tensors parts = reduce_scatter_coalesced(group, inputs[group.rank()], kSum).wait();
    ASSERT_EQ(parts.size(), shapes.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor whole = reduce_alone(column(inputs, i), kSum);
      const std::int64_t rows = whole.size(0) / size;
      EXPECT_TRUE(is_right(parts[i], whole.narrow(0, rows * group.rank(), rows))) << i;
    }
    const auto version = parts[1]._version();
    parts[0].add_(1);
    EXPECT_EQ(parts[1]._version(), version) << "the results are independent tensors";
  });
}

// peer: c10d `test_all_gather_into_tensor_coalesced`: same
TEST_P(CollectiveCoalesced, GathersEachTensorIntoItsOutput) {
  run([&](Group& group) {
    const Shapes shapes{{3}, {2, 3}, {0}, {}, {20001}};
    const auto inputs = inputs_of(shapes, at::kFloat);
    const std::int64_t size = ranks();
    const Tensors outputs{at::zeros({3 * size}), at::zeros({size, 2, 3}), at::zeros({0}), at::zeros({size}),
                          at::zeros({20001 * size, 2}).select(1, 0)};
    const Tensors results = all_gather_into_tensor_coalesced(group, outputs, inputs[group.rank()]).wait();
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(results[i].is_same(outputs[i]));
      EXPECT_TRUE(same_bits(outputs[i], at::stack(column(inputs, i)).view(outputs[i].sizes()))) << i;
    }
  });
}

TEST_P(CollectiveCoalesced, RejectsInvalidArgumentsAndContinues) {
  run([&](Group& group) {
    const at::Tensor one = at::ones({ranks()});
    EXPECT_THROW(static_cast<void>(all_reduce_coalesced(group, {})), Error);
    EXPECT_THROW(static_cast<void>(all_reduce_coalesced(group, {one, at::Tensor()})), Error);
    EXPECT_THROW(static_cast<void>(all_reduce_coalesced(group, {one, at::ones({1}, at::kInt)})), Error);
    EXPECT_THROW(static_cast<void>(reduce_scatter_coalesced(group, {one, at::scalar_tensor(1)})), Error);
    EXPECT_THROW(static_cast<void>(all_gather_into_tensor_coalesced(group, {one}, {one, one})), Error);
    EXPECT_THROW(static_cast<void>(
                     all_gather_into_tensor_coalesced(group, {at::ones({ranks() + 1, 3})}, {at::ones({3})})),
                 Error);
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

/// Their sizes together are equal.
TEST_P(CollectiveCoalesced, NamesRanksWhoseShapesDiffer) {
  if (ranks() == 1) return;
  const std::vector<std::function<void(Group&, const Tensors&)>> calls = {
      [](Group& group, const Tensors& tensors) { all_reduce_coalesced(group, tensors).wait(); },
      [](Group& group, const Tensors& tensors) { reduce_scatter_coalesced(group, tensors).wait(); },
      [&](Group& group, const Tensors& tensors) {
        Tensors outputs;
        for (const at::Tensor& tensor : tensors) outputs.push_back(at::stack(Tensors(ranks(), tensor)));
        all_gather_into_tensor_coalesced(group, outputs, tensors).wait();
      }};
  for (const auto& call : calls) {
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           Group group = make_group_of_suite(self.runtime, self.membership, options());
           const at::Tensor small = at::ones({ranks()}), large = at::ones({ranks() * 2, 3});
           std::exception_ptr failure;
           try {
             call(group, self.rank == ranks() - 1 ? Tensors{small, large} : Tensors{large, small});
           } catch (...) {
             failure = std::current_exception();
           }
           self.membership.barrier("test.end", {}, world_.executor().deadline_in(std::chrono::seconds(60)));
           if (failure) std::rethrow_exception(failure);
         })) {
      ASSERT_TRUE(failure);
      EXPECT_EQ(to_error(failure).kind(), ErrorKind::kInvalid);
      EXPECT_THAT(to_error(failure).what(), AllOf(HasSubstr("worker0"), HasSubstr("_coalesced(Float"),
                                                  HasSubstr("worker" + std::to_string(ranks() - 1))));
    }
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_coalesced
