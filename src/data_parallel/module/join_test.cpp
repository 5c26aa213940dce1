#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"
#include "state/api/gradient_norm.h"

namespace torchspan::data_parallel::join_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

nn::Linear linear() {
  nn::Linear made(nn::LinearOptions(1, 1).bias(false));
  const at::NoGradGuard no_grad;
  made->weight.fill_(2);
  return made;
}

at::Tensor rows(double value) { return at::full({1, 1}, value); }

// peer: ddp ddp_uneven_inputs, ddp_grad_div_uneven_inputs, ddp_join_model_equivalence: same
TEST(Join, LetsRanksWithFewerBatchesShadowTheOthers) {
  for (const bool initial : {true, false}) {
    on_ranks(3, [&](const Rank& self) {
      nn::Linear net = linear();
      DistributedDataParallel model(net, self.group);
      const int batches = 1 + 2 * self.rank;  // 1, 3 and 5
      int done = 0;
      model.join(
          [&] {
            for (; done < batches; ++done) {
              net->zero_grad();
              model(rows(self.rank + 1)).sum().backward();
              const double live = done < 1   ? 6
                                  : done < 3 ? 5
                                             : 3,
                           count = initial    ? 3
                                   : done < 1 ? 3
                                   : done < 3 ? 2
                                              : 1;
              expect_close(net->weight.grad(), at::full({1, 1}, live / count), 1e-6);
              const at::NoGradGuard no_grad;
              net->weight.sub_(net->weight.grad());
            }
          },
          {.divide_by_initial_world_size = initial});
      EXPECT_EQ(done, batches);
      const auto weights = self.group.all_gather(net->weight.detach()).wait();
      for (const auto& weight : weights)
        EXPECT_TRUE(at::equal(weight, weights[2])) << "not as the last joiner's";
      const double steps = initial ? 6.0 / 3 + 2 * 5.0 / 3 + 2 * 3.0 / 3 : 6.0 / 3 + 2 * 5.0 / 2 + 2 * 3.0;
      expect_close(weights[0], at::full({1, 1}, 2 - steps), 1e-5);
    });
  }
}

// peer: ddp ddp_uneven_inputs
TEST(Join, WorksWithHooksUnusedParametersBuffersAndStaticGraphs) {
  for (const int kind : {0, 1, 2}) {
    on_ranks(3, [&](const Rank& self) {
      nn::Sequential net(nn::Linear(2, 4), nn::BatchNorm1d(4), nn::Linear(4, 1));
      DistributedDataParallel model(net, self.group,
                                    {.bucket_cap_mb = 1e-5,
                                     .first_bucket_mb = 1e-5,
                                     .find_unused_parameters = kind == 1,
                                     .static_graph = kind == 2});
      if (kind == 0) model.register_comm_hook(all_reduce_hook(), "all_reduce");
      torch::optim::SGD optimizer(net->parameters(), 0.01);
      model.join([&] {
        for (int i = 0; i < 2 + 2 * (2 - self.rank); ++i) {
          optimizer.zero_grad();
          model(at::ones({3, 2}) * (i + self.rank) + at::arange(3, at::kFloat).unsqueeze(1))
              .pow(2)
              .sum()
              .backward();
          optimizer.step();
        }
      });
      for (const auto& parameter : net->parameters()) {
        const auto all = self.group.all_gather(parameter.detach()).wait();
        for (const auto& one : all) EXPECT_TRUE(at::equal(one, all[0]));
      }
    });
  }
}

// peer: ddp ddp_uneven_input_join_disable: same: not to call join() is to disable it
TEST(Join, AcceptsEvenInputsAndNoInputs) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    model.join([] {});
    model.join([&] {
      for (int i = 0; i < 2; ++i) {
        net->zero_grad();
        const auto guard = model.no_sync();
        model(rows(1)).sum().backward();
      }
    });
    model(rows(1 + self.rank)).sum().backward();
    expect_close(net->weight.grad(), at::full({1, 1}, 1 + 1.5), 1e-6);
  });
}

// peer: ddp ddp_uneven_input_exception: better: the others learn which rank's loop threw
TEST(Join, ThrowsOnAllWhenAskedToEndEarly) {
  on_ranks(3, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    const std::string text = error_text([&] {
      model.join(
          [&] {
            for (int i = 0; i < (self.rank == 1 ? 2 : 4); ++i) model(rows(1)).sum().backward();
          },
          {.throw_on_early_termination = true});
    });
    EXPECT_NE(text.find("rank 1 has run out of batches"), std::string::npos) << text;
  });
}

// peer: ddp ddp_uneven_input_exception
TEST(Join, ReportsALoopThatThrewToTheOtherRanks) {
  on_ranks(3, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    const auto train = [&] {
      model.join([&] {
        for (int i = 0; i < 2 + self.rank; ++i) {
          if (self.rank == 2 && i == 1) throw std::runtime_error("no such file");
          model(rows(1)).sum().backward();
        }
      });
    };
    if (self.rank == 2) {
      EXPECT_THROW(train(), std::runtime_error);
    } else {
      const std::string text = error_text(train);
      EXPECT_NE(text.find("the training loop of rank 2"), std::string::npos) << text;
      EXPECT_NE(text.find("no such file"), std::string::npos) << text;
    }
    net->zero_grad();
    model(rows(self.rank)).sum().backward();
    expect_close(net->weight.grad(), at::full({1, 1}, 1.0), 1e-6);
  });
}

// peer: ddp ddp_uneven_input_exception
TEST(Join, ReportsALoopThatThrewBetweenForwardAndBackwardToRanksInAReduction) {
  on_ranks(3, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    const auto train = [&] {
      model.join([&] {
        for (int i = 0; i < 3; ++i) {
          const at::Tensor loss = model(rows(1)).sum();
          if (self.rank == 2 && i == 1) throw std::runtime_error("the loss is not a number");
          loss.backward();
        }
      });
    };
    if (self.rank == 2) {
      EXPECT_THROW(train(), std::runtime_error);
    } else {
      const std::string text = error_text(train);
      EXPECT_NE(text.find("the training loop of rank 2"), std::string::npos) << text;
      EXPECT_NE(text.find("the loss is not a number"), std::string::npos) << text;
    }
    net->zero_grad();
    model(rows(self.rank)).sum().backward();
    expect_close(net->weight.grad(), at::full({1, 1}, 1.0), 1e-6);
  });
}

/// As in adversarial training, with one backward over both forwards or one for each.
TEST(Join, AllowsTwoForwardsBeforeTheirBackwards) {
  for (const bool together : {true, false}) {
    for (const bool buffered : {true, false}) {
      on_ranks(3, [&](const Rank& self) {
        nn::Linear last = linear();
        nn::Sequential net(last);
        if (buffered) net->push_back(nn::BatchNorm1d(nn::BatchNormOptions(1).affine(false)));
        net->eval();
        DistributedDataParallel model(net, self.group);
        const double scale = buffered ? 1 / std::sqrt(1 + 1e-5) : 1;
        int done = 0;
        model.join([&] {
          for (; done < 1 + self.rank; ++done) {
            last->zero_grad();
            const at::Tensor real = model(rows(self.rank + 1)).sum(), fake = model(rows(10)).sum();
            const double live = done == 0 ? 6 : done == 1 ? 5 : 3, count = 3 - done;
            const auto expect_gradient = [&](double sum) {
              expect_close(last->weight.grad(), at::full({1, 1}, scale * sum / 3), 1e-5);
            };
            if (together) {
              (real + fake).backward();
              expect_gradient(live + 10 * count);
              continue;
            }
            real.backward();
            expect_gradient(live);
            last->zero_grad();
            fake.backward();
            expect_gradient(10 * count);
          }
        });
        EXPECT_EQ(done, 1 + self.rank);
        last->zero_grad();
        model(rows(self.rank)).sum().backward();
        expect_close(last->weight.grad(), at::full({1, 1}, scale), 1e-5);
      });
    }
  }
}

TEST(Join, AllowsAForwardWithoutABackward) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    model.join([&] {
      for (int i = 0; i < 1 + 2 * self.rank; ++i) {
        net->zero_grad();
        model(rows(7));  // the output is discarded
        model(rows(self.rank + 1)).sum().backward();
        expect_close(net->weight.grad(), at::full({1, 1}, i == 0 ? 1.5 : 1.0), 1e-6);
      }
    });
  });
}

TEST(Join, LeavesTheGradientsOfARankWithoutBatchesAsTheyAre) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      nn::Linear net = linear();
      DistributedDataParallel model(net, self.group, {.gradient_as_bucket_view = view});
      model.join([&] {
        for (int i = 0; i < 1 + 3 * self.rank; ++i) {
          net->zero_grad();
          model(rows(i + self.rank + 1)).sum().backward();
        }
      });
      expect_close(net->weight.grad(), at::full({1, 1}, self.rank == 0 ? 1.5 : 2.5), 1e-6);
    });
  }
}

/// Linear, whose forward throws for the input 13.
struct SkipsThirteenImpl : nn::Module {
  SkipsThirteenImpl() : linear(register_module("linear", join_test::linear())) {}
  at::Tensor forward(const at::Tensor& x) {
    if (x.item<double>() == 13) throw std::runtime_error("not that number");
    return linear(x);
  }
  nn::Linear linear;
};
TORCH_MODULE(SkipsThirteen);

TEST(Join, GoesOnAfterAForwardThatThrewAndWasCaught) {
  on_ranks(3, [](const Rank& self) {
    SkipsThirteen net;
    DistributedDataParallel model(net, self.group);
    int failed = 0;
    model.join([&] {
      for (int i = 0; i < 3 + self.rank; ++i) {
        try {
          net->zero_grad();
          model(rows(i == 1 && self.rank == 2 ? 13 : 3)).sum().backward();
          const double live = i < 3 ? 3 : 5 - i;
          expect_close(net->linear->weight.grad(), at::full({1, 1}, live), 1e-6);
        } catch (const std::exception& error) {
          ++failed;
          EXPECT_EQ(i, 1);
          EXPECT_NE(std::string(error.what()).find("not that number"), std::string::npos) << error.what();
        }
      }
    });
    EXPECT_EQ(failed, 1);
  });
}

// A norm or decision over all ranks' own values would wait for ranks without batches.
TEST(Join, RefusesToClipOrScaleParametersOfEachRank) {
  for (const bool scales : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      nn::Sequential net(linear(), linear());
      DistributedDataParallel model(net, self.group, {.ignored_parameters = {"1.weight"}});
      const auto step = [&] {
        model(rows(1)).sum().backward();
        const auto gradients = state::gradients_at_places(net->parameters());
        if (scales) {
          state::on_any_rank(gradients, false);
        } else {
          static_cast<void>(state::norm_over_places(gradients, 2));
        }
      };
      try {
        model.join([&] {
          for (int batch = 0; batch <= self.rank; ++batch) step();
        });
        ADD_FAILURE() << "nothing was thrown on rank " << self.rank;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("DataParallelOptions::ignored_parameters"));
      }
    });
  }
}

TEST(Join, EndsOnAllRanksWhenTheyDisagreeAboutTheNextOperation) {
  on_ranks(3, [](const Rank& self) {
    nn::Linear net = linear();
    DistributedDataParallel model(net, self.group);
    const std::string text = error_text([&] {
      model.join([&] {
        for (int i = 0; i < (self.rank == 2 ? 1 : 4); ++i) {
          const at::Tensor loss = model(rows(1)).sum();
          if (self.rank == 1 && i == 1) continue;
          try {
            loss.backward();
          } catch (const Error&) {  // a program that catches every error does not hang either
          }
        }
      });
    });
    EXPECT_NE(text.find("rank 0 begins a reduction and rank 1 begins a forward"), std::string::npos) << text;
    net->zero_grad();
    model(rows(self.rank)).sum().backward();
    expect_close(net->weight.grad(), at::full({1, 1}, 1.0), 1e-6);
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::join_test
