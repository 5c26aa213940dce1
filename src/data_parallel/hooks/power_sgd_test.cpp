#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::power_sgd_test {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

const DataParallelOptions kBuckets{.bucket_cap_mb = 200 / 1048576.0, .first_bucket_mb = 100 / 1048576.0};
/// Compresses every gradient from the first step on.
const PowerSgdOptions kAlways{.rank = 1, .start_iteration = 0, .min_compression_rate = 0};

Tensors some_parameters() { return {leaf({6, 4}), leaf({7}), leaf({3, 5, 2}), leaf({4, 3}, at::kDouble)}; }

/// The gradients of this rank alone.
Tensors own_gradients(const Tensors& parameters, int rank, int step) {
  Tensors copies, gradients;
  for (const auto& parameter : parameters)
    copies.push_back(parameter.detach().clone().set_requires_grad(true));
  loss_of(copies, rank, step).backward();
  for (const auto& copy : copies) gradients.push_back(copy.grad());
  return gradients;
}

at::Tensor entry(const PowerSgd& power, const std::string& name) {
  for (const auto& [found, tensor] : power.state()) {
    if (found == name) return tensor;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

// peer: ddp `ddp_hook_parity_powerSGD`: same
TEST(PowerSgd, OfFullRankAveragesToTheDtypesPrecision) {
  on_ranks(3, [](const Rank& self) {
    const Tensors parameters = some_parameters();
    PowerSgdOptions options = kAlways;
    options.rank = 100;
    const PowerSgd power(options);
    Reducer reducer(named(parameters), self.group, kBuckets);
    reducer.register_comm_hook(power.hook(), "power_sgd");
    for (int i = 0; i < 4; ++i) {
      zero(parameters, i % 2 == 0);
      const Tensors wanted = expected(parameters, self.size, i);
      step(reducer, loss_of(parameters, self.rank, i));
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        expect_close(parameters[p].grad(), wanted[p],
                     parameters[p].scalar_type() == at::kDouble ? 1e-11 : 1e-5);
      }
    }
    EXPECT_EQ(power.iteration(), 4);
  });
}

TEST(PowerSgd, SendsWholeGradientsBeforeItsStart) {
  PerRank<Tensors> with(2), without(2);
  for (const bool hooked : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters = some_parameters();
      PowerSgdOptions options = kAlways;
      options.start_iteration = 2;
      Reducer reducer(named(parameters), self.group, kBuckets);
      if (hooked) reducer.register_comm_hook(PowerSgd(options).hook(), "power_sgd");
      for (int i = 0; i < 2; ++i) step(reducer, loss_of(parameters, self.rank, i));
      for (const auto& parameter : parameters)
        (hooked ? with : without)[self.rank].push_back(parameter.grad().clone());
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t p = 0; p < 4; ++p) EXPECT_TRUE(at::equal(with[rank][p], without[rank][p]));
  }
}

TEST(PowerSgd, KeepsWhatItDidNotSendAndGivesAllRanksTheSameBits) {
  constexpr int kSize = 3, kSteps = 3;
  PerRank<Tensors> averages(kSize);
  on_ranks(kSize, [&](const Rank& self) {
    const Tensors parameters = some_parameters();
    const PowerSgd power(kAlways);
    Reducer reducer(named(parameters), self.group, kBuckets);
    reducer.register_comm_hook(power.hook(), "power_sgd");
    Tensors errors;
    for (const auto& parameter : parameters) errors.push_back(at::zeros_like(parameter));
    for (int i = 0; i < kSteps; ++i) {
      zero(parameters, true);
      step(reducer, loss_of(parameters, self.rank, i));
      const Tensors own = own_gradients(parameters, self.rank, i);
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const at::Tensor error = entry(power, "error.p" + std::to_string(p)).reshape(own[p].sizes());
        expect_close(error + parameters[p].grad(), own[p] + errors[p], 1e-5);
        errors[p] = error;
        averages[self.rank].push_back(parameters[p].grad().clone());
      }
    }
    EXPECT_GT(errors[0].norm().item<double>(), 1e-3) << "rank 1 cannot hold this gradient";
  });
  for (int rank = 1; rank < kSize; ++rank) {
    for (std::size_t i = 0; i < averages[0].size(); ++i)
      EXPECT_TRUE(at::equal(averages[rank][i], averages[0][i]));
  }
}

/// The relative distance between a constant gradient and the mean of the averages of `steps` steps.
double distance_of_mean(bool error_feedback, bool warm_start, int steps) {
  double distance = 0;
  on_ranks(2, [&](const Rank& self) {
    const Tensors parameters{at::zeros({8, 6}).set_requires_grad(true)};
    const at::Tensor constant = at::arange(48, at::kFloat).mul(1.7).sin().reshape({8, 6});
    PowerSgdOptions options = kAlways;
    options.error_feedback = error_feedback;
    options.warm_start = warm_start;
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(PowerSgd(options).hook(), "power_sgd");
    at::Tensor sum = at::zeros({8, 6});
    for (int i = 0; i < steps; ++i) {
      zero(parameters, true);
      step(reducer, (parameters[0] * constant * (self.rank == 0 ? 0.5 : 1.5)).sum());
      sum += parameters[0].grad();
    }
    if (self.rank == 0) distance = ((sum / steps - constant).norm() / constant.norm()).item<double>();
  });
  return distance;
}

TEST(PowerSgd, OfAConstantGradientSendsAllOfItInTheLongRun) {
  for (const bool warm : {true, false}) {
    EXPECT_LT(distance_of_mean(true, warm, 60), 0.05) << warm;
  }
  EXPECT_GT(distance_of_mean(false, true, 60), 0.3) << "without error feedback, a part is lost at every step";
}

TEST(PowerSgd, SendsFewerBytesAndLeavesSmallGradientsWhole) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({40, 50}), leaf({50})};
    const PowerSgd power({.rank = 2, .start_iteration = 0});
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(power.hook(), "power_sgd");
    const Tensors wanted = expected(parameters, self.size, 0);
    step(reducer, loss_of(parameters, self.rank, 0));
    expect_close(parameters[1].grad(), wanted[1], 1e-6);
    EXPECT_EQ(power.traffic().gradients, 4U * 2050);
    EXPECT_EQ(power.traffic().sent, 4U * (2 * (40 + 50) + 50));
  });
}

// peer: ddp `ddp_hook_pickling_powerSGD`: same
TEST(PowerSgd, ResumesToTheBit) {
  constexpr int kSize = 2;
  PerRank<Tensors> whole(kSize), resumed(kSize);
  for (const bool interrupt : {false, true}) {
    on_ranks(kSize, [&](const Rank& self) {
      const Tensors parameters = some_parameters();
      std::optional<PowerSgd> power(kAlways);
      std::optional<Reducer> reducer;
      const auto begin = [&] {
        reducer.emplace(named(parameters), self.group, kBuckets);
        reducer->register_comm_hook(power->hook(), "power_sgd");
      };
      begin();
      for (int i = 0; i < 4; ++i) {
        if (interrupt && i == 2) {
          const auto state = power->state();
          power.emplace(kAlways);
          power->load_state(state);
          begin();
        }
        zero(parameters, true);
        step(*reducer, loss_of(parameters, self.rank, i));
      }
      for (const auto& parameter : parameters)
        (interrupt ? resumed : whole)[self.rank].push_back(parameter.grad().clone());
    });
  }
  for (int rank = 0; rank < kSize; ++rank) {
    for (std::size_t p = 0; p < 4; ++p) EXPECT_TRUE(at::equal(whole[rank][p], resumed[rank][p])) << p;
  }
}

TEST(PowerSgd, WorksInsideACompressingWrapper) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({6, 4}), leaf({7})};
    PowerSgdOptions options = kAlways;
    options.rank = 4;
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(bf16_compress_wrapper(PowerSgd(options).hook()), "power_sgd in bf16");
    const Tensors wanted = expected(parameters, 2, 0);
    step(reducer, loss_of(parameters, self.rank, 0));
    for (std::size_t p = 0; p < 2; ++p) expect_close(parameters[p].grad(), wanted[p], 3e-2);
  });
}

TEST(PowerSgd, OfGradientsThatAreZeroIsZero) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({6, 4})};
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(PowerSgd(kAlways).hook(), "power_sgd");
    for (int i = 0; i < 2; ++i) {
      zero(parameters, true);
      step(reducer, (parameters[0] * 0).sum());
      EXPECT_TRUE(at::equal(parameters[0].grad(), at::zeros({6, 4})));
    }
  });
}

TEST(PowerSgd, ForgetsTheErrorOfAStepThatOverflowed) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({6, 4})};
    const PowerSgd power(kAlways);
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(power.hook(), "power_sgd");
    for (int i = 0; i < 4; ++i) {
      zero(parameters, true);
      const double scale = i == 1 && self.rank == 0 ? std::numeric_limits<double>::infinity() : 1;
      step(reducer, loss_of(parameters, self.rank, i) * scale);
      EXPECT_EQ(at::isfinite(parameters[0].grad()).all().item<bool>(), i != 1) << "step " << i;
    }
    EXPECT_TRUE(at::isfinite(entry(power, "error.p0")).all().item<bool>());
  });
}

// peer: ddp `invalid_powerSGD_state`: same
TEST(PowerSgd, RejectsOptionsAndStatesWithoutAMeaning) {
  EXPECT_THAT(error_text([] { PowerSgd({.rank = 0}); }), HasSubstr("PowerSgdOptions::rank is 0"));
  EXPECT_THAT(error_text([] { PowerSgd({.start_iteration = -1}); }), HasSubstr("start_iteration is -1"));
  EXPECT_THAT(error_text([] { PowerSgd({.min_compression_rate = -1}); }),
              HasSubstr("min_compression_rate is -1"));
  EXPECT_THAT(error_text([] {
                PowerSgd().load_state({{"momentum.p0", at::zeros({2, 2})}});
              }),
              HasSubstr("'momentum.p0' is not part of the state"));
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({6, 4})};
    PowerSgd power(kAlways);
    power.load_state({{"error.p0", at::zeros({4, 6})}});
    Reducer reducer(named(parameters), self.group);
    reducer.register_comm_hook(power.hook(), "power_sgd");
    self.group.barrier();  // the other rank has its reducer, too, before this one fails
    EXPECT_THAT(error_text([&] { step(reducer, loss_of(parameters, self.rank, 0)); }),
                AllOf(HasSubstr("'p0'"), HasSubstr("[4, 6]")));
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::power_sgd_test
