#include <gmock/gmock.h>

#include <ATen/ATen.h>

#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"

namespace torchspan::testing::collective_dense {
namespace {

using namespace collective;

class CollectiveDense : public CollectiveSuite {};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveDense, ::testing::ValuesIn(collective_rows()), row_name);

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                             at::kByte,  at::kChar,   at::kShort,        at::kInt,
                                             at::kLong,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
const std::vector<ReduceOp> kReductions = {kSum, kAvg, kMin, kMax, kProduct};

bool makes_sense(at::ScalarType dtype, ReduceOp reduction) {
  if (reduction == kAvg) return at::isFloatingType(dtype) || at::isComplexType(dtype);
  if (reduction == kMin || reduction == kMax) return !at::isComplexType(dtype);
  return true;
}

// peer: c10d `testAllReduceCPU`, `testAllReduceBfloatCPU`, Horovod's
//   `allreduce_{average,min,max,product,inplace}`: same, every dtype
TEST_P(CollectiveDense, AllReducesEveryDtypeByEveryReductionLikeOneProcessInRankOrder) {
  run([&](Group& group) {
    std::uint64_t seed = 1;
    for (const at::ScalarType dtype : kDtypes) {
      for (const ReduceOp reduction : kReductions) {
        for (const std::int64_t length : {7L, 1000L, 70001L}) {
          // How a large tensor is cut depends on its type. Only an average is more than a loop over each piece.
          if (length > 1000 && reduction != kSum && reduction != kAvg) continue;
          const SharedInputs inputs = inputs_of_ranks({length}, dtype, ++seed);
          at::Tensor mine = inputs[group.rank()].clone();
          if (!makes_sense(dtype, reduction)) {
            EXPECT_THROW(static_cast<void>(group.all_reduce(mine, reduction)), Error);
            continue;
          }
          const at::Tensor result = group.all_reduce(mine, reduction).wait();
          EXPECT_TRUE(result.is_same(mine));
          EXPECT_TRUE(is_right(mine, inputs.reduced(reduction)))
              << to_string(reduction) << " of " << c10::toString(dtype) << " " << length;
        }
      }
    }
  });
}

// peer: c10d MLX's odd sizes: same
TEST_P(CollectiveDense, AllReducesSizesFromZeroUp) {
  run([&](Group& group) {
    for (const std::int64_t length : {0L, 1L, 2L, 3L, 15L, 16L, 17L, 8191L, 8192L, 8193L, 65535L, 65536L,
                                      65537L, (1L << 18) + 3, (1L << 20) - 1, (1L << 20) + 5}) {
      const SharedInputs inputs = inputs_of_ranks({length}, at::kFloat, length + 1);
      at::Tensor mine = inputs[group.rank()].clone();
      group.all_reduce(mine).wait();
      EXPECT_TRUE(is_right(mine, inputs.reduced(kSum))) << length;
    }
  });
}

/// Much larger than any buffer; whole numbers, whose sum does not depend on the order.
class CollectiveLarge : public CollectiveSuite {};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveLarge, ::testing::ValuesIn(rows_of(2)), row_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CollectiveLarge);

// peer: c10d MLX's odd sizes
TEST_P(CollectiveLarge, AllReducesMuchMoreThanItsBuffersHold) {
  // 64 MiB and a bit, more than most caches; on devices and over Gloo, where copies are slow, 20 MiB: five times as much as
  // the largest buffer.
  const BackendKind backend = GetParam().backend;
  const bool fast = backend == BackendKind::kSharedMemory || backend == BackendKind::kNetwork;
  const std::int64_t length = (std::int64_t{fast && !GetParam().tls ? 16 : 5} << 20) + 7;
  const at::Tensor pattern = at::arange(length, at::kInt).remainder_(1009).to(at::kFloat);
  run([&](Group& group) {
    at::Tensor mine = pattern + group.rank();
    const at::Tensor bucket = group.allocate({length}, at::kFloat);
    bucket.copy_(mine);
    const auto first = group.all_reduce(mine), second = group.all_reduce(bucket, kMax);
    first.wait();
    second.wait();
    EXPECT_TRUE(at::equal(mine.sub_(1).div_(2), pattern));
    EXPECT_TRUE(at::equal(bucket.sub_(1), pattern));
  });
}

TEST_P(CollectiveDense, AllReducesWhatLiesInSharedBuckets) {
  run([&](Group& group) {
    // Four times as much as a rank reduces at once.
    const at::Tensor bucket = group.allocate({1 << 18}, at::kFloat);
    for (const std::int64_t length : {1L, 100L, 8193L, 65537L, (1L << 18) - 3}) {
      for (const std::int64_t offset : {0L, 1L, 2L}) {
        const SharedInputs inputs = inputs_of_ranks({length}, at::kFloat, 31 * length + offset);
        const at::Tensor mine = bucket.narrow(0, offset, length);
        mine.copy_(inputs[group.rank()]);
        group.all_reduce(mine, kAvg).wait();
        EXPECT_TRUE(is_right(mine, inputs.reduced(kAvg))) << length << " at " << offset;
        group.barrier();
      }
    }
  });
}

// peer: c10d testAllReduceCPU
TEST_P(CollectiveDense, WorksOnTensorsOfAnyStridesInPlace) {
  run([&](Group& group) {
    for (const std::int64_t side : {5L, 301L}) {
      const SharedInputs inputs = inputs_of_ranks({side, side + 1}, at::kDouble, side);
      at::Tensor whole = at::zeros({side + 1, 2 * side});
      whole = whole.to(at::kDouble);
      const at::Tensor mine = whole.t().slice(0, 0, 2 * side, 2);
      mine.copy_(inputs[group.rank()]);
      group.all_reduce(mine).wait();
      EXPECT_TRUE(is_right(mine.contiguous(), inputs.reduced(kSum)));
      EXPECT_EQ(whole.t().slice(0, 1, 2 * side, 2).abs().sum().item<double>(), 0) << "neighbors were touched";
      mine.fill_(group.rank());
      group.broadcast(mine, ranks() - 1).wait();
      EXPECT_TRUE((mine == ranks() - 1).all().item<bool>());
    }
  });
}

// peer: c10d testBroadcastCPU
TEST_P(CollectiveDense, ScattersReducedPartsAndGathersThemAgain) {
  run([&](Group& group) {
    for (const std::int64_t rows : {0L, 1L, 13L, 4001L}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kLong}) {
        const SharedInputs inputs = inputs_of_ranks({rows * ranks(), 17}, dtype, rows + 5);
        const at::Tensor mine = inputs[group.rank()].clone(), sum = inputs.reduced(kSum);
        const at::Tensor part = group.reduce_scatter(mine).wait();
        EXPECT_TRUE(is_right(part, sum.narrow(0, rows * group.rank(), rows)));
        EXPECT_TRUE(same_bits(mine, inputs[group.rank()])) << "the input was changed";
        const auto parts = group.all_gather(part).wait();
        EXPECT_TRUE(is_right(at::cat(parts), sum));
      }
    }
  });
}

TEST_P(CollectiveDense, ScattersWhatLiesInSharedBuckets) {
  run([&](Group& group) {
    const std::int64_t length = 40000L * ranks();
    const SharedInputs inputs = inputs_of_ranks({length}, at::kFloat, 9);
    const at::Tensor mine = group.allocate({length}, at::kFloat);
    for (int time = 0; time < 3; ++time) {
      mine.copy_(inputs[group.rank()]);
      const at::Tensor part = group.reduce_scatter(mine, kAvg).wait();
      mine.zero_();
      EXPECT_TRUE(is_right(part, inputs.reduced(kAvg).narrow(0, 40000L * group.rank(), 40000)));
    }
  });
}

// peer: c10d testBroadcastCPU
TEST_P(CollectiveDense, GathersTensorsWhoseFirstDimensionsDiffer) {
  run([&](Group& group) {
    for (const std::int64_t unit : {0L, 1L, 999L, 30011L}) {
      std::vector<at::Tensor> inputs;
      for (int rank = 0; rank < ranks(); ++rank) {
        inputs.push_back(random_inputs(1, {unit * (ranks() - rank), 3}, at::kInt, rank + 100)[0]);
      }
      const auto results = group.all_gather(inputs[group.rank()]).wait();
      ASSERT_EQ(results.size(), inputs.size());
      for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(same_bits(results[i], inputs[i])) << unit;
    }
    EXPECT_EQ(group.all_gather(at::scalar_tensor(group.rank())).wait().back().item<int>(), ranks() - 1);
    const at::Tensor stacked = at::empty({ranks()});
    group.all_gather_into_tensor(stacked, at::scalar_tensor(group.rank())).wait();
    EXPECT_EQ(stacked[-1].item<int>(), ranks() - 1);
    if (ranks() > 1) {
      EXPECT_THROW(static_cast<void>(group.all_gather_into_tensor(at::zeros({}), at::zeros({}))), Error)
          << "it is too small";
    }
  });
}

// peer: c10d `testBroadcastCPU`, `testAllToAllCPU`, all-gather, reduce-scatter: same
TEST_P(CollectiveDense, BroadcastsFromEveryRoot) {
  run([&](Group& group) {
    for (int root = 0; root < ranks(); ++root) {
      for (const std::int64_t length : {0L, 1L, 9000L, 400001L}) {
        if (length == 400001 && !is_outer(root)) continue;
        const at::Tensor input = random_inputs(1, {length}, at::kDouble, root + length)[0];
        at::Tensor mine = group.rank() == root ? input.clone() : at::zeros_like(input);
        EXPECT_TRUE(group.broadcast(mine, root).wait().is_same(mine));
        EXPECT_TRUE(same_bits(mine, input));
      }
    }
  });
}

// peer: c10d testBroadcastCPU
TEST_P(CollectiveDense, SendsPartsOfAllShapesToEveryRank) {
  run([&](Group& group) {
    for (const std::int64_t unit : {0L, 3L, 50000L}) {
      const auto part = [&](int from, int to) {
        return random_inputs(1, {unit * ((from + 2 * to) % 3), to + 1}, at::kShort, 10 * from + to)[0];
      };
      std::vector<at::Tensor> parts;
      for (int to = 0; to < ranks(); ++to) parts.push_back(part(group.rank(), to));
      const auto results = group.all_to_all(parts).wait();
      ASSERT_EQ(static_cast<int>(results.size()), ranks());
      for (int from = 0; from < ranks(); ++from) {
        EXPECT_TRUE(same_bits(results[from], part(from, group.rank()))) << from << " " << unit;
      }
    }
  });
}

TEST_P(CollectiveDense, ExchangesBytesOfAnyLength) {
  run([&](Group& group) {
    for (const std::size_t length : {std::size_t{0}, std::size_t{5}, std::size_t{700000}}) {
      const Bytes mine(length * static_cast<std::size_t>(group.rank() + 1), std::byte(group.rank()));
      const auto all = group.all_gather_bytes(mine);
      ASSERT_EQ(static_cast<int>(all.size()), ranks());
      for (int rank = 0; rank < ranks(); ++rank) {
        EXPECT_EQ(all[rank], Bytes(length * static_cast<std::size_t>(rank + 1), std::byte(rank)));
      }
    }
  });
}

/// The threads of a group are in no inference mode, and write to tensors of one.
TEST_P(CollectiveDense, WorksOnInferenceTensors) {
  run([&](Group& group) {
    const c10::InferenceMode inference;
    const int size = group.size(), rank = group.rank();
    const auto expect_all = [](const at::Tensor& tensor, double value, const char* what) {
      EXPECT_TRUE((tensor == value).all().item<bool>()) << what << ": " << tensor.flatten()[0].item<double>();
    };
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      expect_all(group.all_reduce(at::ones({8}, dtype)).wait(), size, "all_reduce");
      expect_all(group.all_reduce(at::ones({30, 20}, dtype).t()).wait(), size,
                 "all_reduce of a strided tensor");
      if (at::isFloatingType(dtype))
        expect_all(group.all_reduce(at::ones({8}, dtype), kAvg).wait(), 1, "average");
      at::Tensor reduced = at::ones({30, 20}, dtype).t();
      group.reduce(reduced, 0).wait();
      expect_all(reduced, rank == 0 ? size : 1, "reduce");
      at::Tensor sent = at::full({30, 20}, rank, dtype).t();
      expect_all(group.broadcast(sent, size - 1).wait(), size - 1, "broadcast");
      std::vector<at::Tensor> parts(rank == 0 ? size : 0, at::ones({4}, dtype));
      at::Tensor part = at::zeros({4}, dtype);
      group.scatter(part, parts, 0).wait();
      expect_all(part, 1, "scatter");
      at::Tensor all = at::zeros({2 * size, 3}, dtype);
      group.all_gather_into_tensor(all, at::ones({2, 3}, dtype)).wait();
      expect_all(all, 1, "all_gather_into_tensor");
      at::Tensor own = at::zeros({1}, dtype);
      group.reduce_scatter_tensor(own, at::ones({size}, dtype)).wait();
      expect_all(own, size, "reduce_scatter_tensor");
      for (const at::Tensor& one :
           group.all_to_all(std::vector<at::Tensor>(size, at::ones({2}, dtype))).wait())
        expect_all(one, 1, "all_to_all");
      for (const at::Tensor& one :
           all_reduce_coalesced(group, {at::ones({3}, dtype), at::ones({2}, dtype)}).wait())
        expect_all(one, size, "all_reduce_coalesced");
      for (const at::Tensor& one : reduce_scatter_coalesced(group, {at::ones({size}, dtype)}).wait())
        expect_all(one, size, "reduce_scatter_coalesced");
    }
    if (size == 1 || is_device_kind(GetParam().backend)) return;  // those groups have no messages
    at::Tensor message = at::zeros({30, 20}).t();
    if (rank == 0) group.send(at::ones({30, 20}).t(), 1).wait();
    if (rank == 1) expect_all(group.recv(message, 0).wait(), 1, "recv");
    group.barrier();
  });
}

TEST_P(CollectiveDense, LeavesAutogradAloneAndCountsVersions) {
  run([&](Group& group) {
    at::Tensor leaf = at::ones({4}).requires_grad_();
    const auto version = leaf._version();
    group.all_reduce(leaf).wait();
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_FALSE(leaf.grad_fn());
    if (ranks() > 1) {
      EXPECT_GT(leaf._version(), version);
    }
    EXPECT_EQ(leaf.sum().item<float>(), 4.0F * static_cast<float>(ranks()));
  });
}

}  // namespace
}  // namespace torchspan::testing::collective_dense
