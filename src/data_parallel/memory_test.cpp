// How all ranks behave when shared memory is full on one rank.
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "data_parallel/toy_model.h"
#include "tests/support/scarce_backend.h"

namespace torchspan::data_parallel::memory_test {
namespace {

using namespace testing;
using torchspan::testing::Scarce;

/// The order in which gradients arrive: the reverse of that of the first buckets.
at::Tensor chain(const Tensors& parameters, int rank) {
  at::Tensor value = at::ones({10}) * (1 + rank);
  for (std::size_t i = parameters.size(); i-- > 0;) value = (value * parameters[i]).sin();
  return value.sum();
}

TEST(ScarceMemory, WhenBucketsAreRebuiltKeepsTheFirstBucketsOnAllRanks) {
  for (const int short_of : {0, 1, 2}) {  // not at all; in rank 1's first or second bucket
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      on_ranks(
          3,
          [&](const Rank& self) {
            Scarce scarce(self.group);
            const Tensors parameters{leaf({10}), leaf({10}), leaf({10})};
            Reducer reducer(named(parameters), scarce.group,
                            {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
            const auto before = reducer.stats().bucket_parameters;
            if (self.rank == 1 && short_of > 0) *scarce.left = short_of - 1;
            for (int i = 0; i < 4; ++i) {
              zero(parameters, i % 2 == 1);
              step(reducer, chain(parameters, self.rank));
              *scarce.left = Scarce::kPlenty;
              EXPECT_EQ(reducer.stats().rebuilt, short_of == 0);
              EXPECT_EQ(reducer.stats().bucket_parameters == before, short_of > 0);
              Tensors copies;
              for (const auto& parameter : parameters)
                copies.push_back(parameter.detach().clone().set_requires_grad(true));
              for (int rank = 0; rank < self.size; ++rank) (chain(copies, rank) / self.size).backward();
              for (std::size_t p = 0; p < copies.size(); ++p)
                expect_close(parameters[p].grad(), copies[p].grad(), 1e-6);
            }
          },
          seed);
    }
  }
}

TEST(ScarceMemory, AtTheStartIsReportedToAllRanks) {
  on_ranks(3, [](const Rank& self) {
    Scarce scarce(self.group);
    const Tensors parameters{leaf({10}), leaf({10})};
    if (self.rank == 2) *scarce.left = 1;
    const std::string text = error_text([&] { Reducer reducer(named(parameters), scarce.group); });
    EXPECT_NE(text.find("rank 2 cannot begin"), std::string::npos) << text;
    EXPECT_NE(text.find("the shared memory is full"), std::string::npos) << text;
    *scarce.left = Scarce::kPlenty;
    Reducer reducer(named(parameters), scarce.group);
    step(reducer, loss_of(parameters, self.rank, 0));
    expect_close(parameters[0].grad(), expected(parameters, 3, 0)[0], 1e-6);
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::memory_test
