#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <torchspan/core/error.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::unused_test {
namespace {

using namespace testing;

const DataParallelOptions kFindUnused{
    .bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6, .find_unused_parameters = true};

at::Tensor squares(const Tensors& parameters, double factor) {
  at::Tensor loss = at::zeros({});
  for (const auto& parameter : parameters) loss = loss + (parameter * parameter).sum() * factor;
  return loss;
}

// peer: ddp forward_backward_unused_parameters, forward_backward_optimizer: same
// peer: ddp `global_local_unused_params_grad` (+view, +static_graph): same
// peer: ddp ddp_control_flow_same_across_ranks, _different_across_ranks: same
TEST(Unused, OnAllRanksStayWithoutAGradientAndOnOneRankGetTheAverage) {
  for (const bool view : {true, false}) {
    on_ranks(3, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4}), leaf({2})};
      DataParallelOptions options = kFindUnused;
      options.gradient_as_bucket_view = view;
      Reducer reducer(named(parameters), self.group, options);
      for (int i = 0; i < 3; ++i) {
        zero(parameters, true);
        // no rank uses p0, rank 1 uses p1, all use p2
        step(reducer,
             self.rank == 1 ? squares({parameters[1], parameters[2]}, 1) : squares({parameters[2]}, 1));
        EXPECT_FALSE(parameters[0].grad().defined());
        expect_close(parameters[1].grad(), parameters[1].detach() * 2 / 3, 1e-6);
        expect_close(parameters[2].grad(), parameters[2].detach() * 2, 1e-6);
      }
      EXPECT_EQ(reducer.stats().unused, self.rank == 1 ? 3U : 6U);
      EXPECT_FALSE(reducer.stats().rebuilt);
    });
  }
}

// peer: ddp forward_backward_unused_parameters
TEST(Unused, KeepExactlyTheGradientTheyHadFromEarlierSteps) {
  for (const bool view : {true, false}) {
    on_ranks(3, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      DataParallelOptions options = kFindUnused;
      options.gradient_as_bucket_view = view;
      Reducer reducer(named(parameters), self.group, options);
      step(reducer, squares(parameters, 1 + self.rank));
      const at::Tensor before = parameters[0].grad().clone();
      step(reducer, squares({parameters[1]}, 1));
      EXPECT_TRUE(at::equal(parameters[0].grad(), before));
      step(reducer, self.rank == 0 ? squares(parameters, 3) : squares({parameters[1]}, 3));
      expect_close(parameters[0].grad(), before + parameters[0].detach() * 2, 1e-6);
    });
  }
}

// peer: ddp output_unused_in_loss_*: same
TEST(Unused, BehindAnOutputThatTheLossLeavesOutAreNoError) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group, kFindUnused);
    for (int i = 0; i < 2; ++i) {
      zero(parameters, true);
      const Tensors outputs =
          reducer.prepare_for_backward({squares({parameters[0]}, 1), squares({parameters[1]}, 1)});
      outputs[0].backward();
      expect_close(parameters[0].grad(), parameters[0].detach() * 2, 1e-6);
      EXPECT_FALSE(parameters[1].grad().defined());
    }
  });
}

/// Passes the first gradient on, but not the second.
struct Withhold : torch::autograd::Function<Withhold> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor& b) {
    return a.sum() + b.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].expand({3}), at::Tensor()};
  }
};

// peer: ddp undefined_grad_parity_unused_parameters: same
TEST(Unused, WhoseGradientIsUndefinedInThePassCountsAsNone) {
  for (const bool withheld_by_all : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, kFindUnused);
      for (int i = 0; i < 2; ++i) {
        zero(parameters, true);
        const bool withheld = withheld_by_all || self.rank == 1;
        step(reducer, withheld ? Withhold::apply(parameters[0], parameters[1])
                               : parameters[0].sum() + squares({parameters[1]}, 1));
        expect_close(parameters[0].grad(), at::ones({3}), 1e-6);
        EXPECT_EQ(parameters[1].grad().defined(), !withheld_by_all);
        if (!withheld_by_all) expect_close(parameters[1].grad(), parameters[1].detach(), 1e-6);
      }
    });
  }
}

// peer: ddp ddp_control_flow_same_across_ranks
TEST(Unused, AllOfThemOnOneRankDoNotHangTheOthers) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group, kFindUnused);
    const at::Tensor input = leaf({3});
    step(reducer, self.rank == 0 ? squares({parameters[0]}, 1) : squares({input}, 1));
    expect_close(parameters[0].grad(), parameters[0].detach(), 1e-6);
  });
}

TEST(Unused, OfOneForwardMayBeUsedByAnotherThatTheSamePassGoesThrough) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4}), leaf({2})};
    Reducer reducer(named(parameters), self.group, kFindUnused);
    for (const bool first_later : {false, true}) {
      zero(parameters, true);
      const at::Tensor one = reducer.prepare_for_backward({squares({parameters[0]}, 1 + self.rank)}).at(0);
      const at::Tensor two = reducer.prepare_for_backward({squares({parameters[1]}, 1)}).at(0);
      (first_later ? two + one : one + two).backward();
      expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
      expect_close(parameters[1].grad(), parameters[1].detach() * 2, 1e-6);
      EXPECT_FALSE(parameters[2].grad().defined());
    }
  });
}

/// The options that change the path of a gradient, one at a time.
std::vector<DataParallelOptions> variants() {
  return {{},
          {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6},
          {.find_unused_parameters = true},
          {.static_graph = true},
          {.gradient_as_bucket_view = false},
          {.find_unused_parameters = true, .gradient_as_bucket_view = false},
          {.static_graph = true, .gradient_as_bucket_view = false}};
}

// peer: ddp `accumulate_gradients_no_sync` (+grad_is_view, hooks): same
TEST(NoSync, AccumulatesHereAndAveragesTheSumLater) {
  for (const DataParallelOptions& options : variants()) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, options);
      for (int i = 0; i < 3; ++i) {
        zero(parameters, i % 2 == 0);
        step(reducer, squares(parameters, 1 + self.rank), {.synchronize = false});
        expect_close(parameters[0].grad(), parameters[0].detach() * 2 * (1 + self.rank), 1e-6);
        step(reducer, squares(parameters, 5));
        expect_close(parameters[0].grad(), parameters[0].detach() * (3 + 10), 1e-6);
        expect_close(parameters[1].grad(), parameters[1].detach() * (3 + 10), 1e-6);
      }
      EXPECT_EQ(reducer.stats().reductions, 3U);
    });
  }
}

TEST(NoSync, AndAReducedForwardInOnePassAreReducedTogether) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group, kFindUnused);
    for (const bool reduced_first : {true, false}) {
      zero(parameters, true);
      const auto prepare = [&](bool reduce) {
        return reducer
            .prepare_for_backward({squares({parameters[reduce ? 0 : 1]}, 1 + self.rank)},
                                  {.synchronize = reduce})
            .at(0);
      };
      const at::Tensor one = prepare(reduced_first), two = prepare(!reduced_first);
      (one + two).backward();
      expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
      expect_close(parameters[1].grad(), parameters[1].detach() * 3, 1e-6);
    }
  });
}

// peer: ddp (documented) two forwards, then two backwards: better: the peer silently leaves the second one
//   local
TEST(TwoForwards, ThenTwoBackwardsAreBothAveraged) {
  for (const DataParallelOptions& options : variants()) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, options);
      for (int i = 0; i < 4; ++i) {
        zero(parameters, i % 2 == 0);
        const at::Tensor one = reducer.prepare_for_backward({squares(parameters, 1 + self.rank)}).at(0);
        const at::Tensor two = reducer.prepare_for_backward({squares(parameters, 3 + self.rank)}).at(0);
        (i == 3 ? two : one).backward();
        (i == 3 ? one : two).backward();
        for (const auto& parameter : parameters)
          expect_close(parameter.grad(), parameter.detach() * (3 + 7), 1e-6);
      }
      EXPECT_EQ(reducer.stats().reductions, 8U);
    });
  }
}

// peer: ddp (documented) two forwards
TEST(TwoForwards, ThenOneBackwardAreAveragedTogether) {
  for (const DataParallelOptions& options : variants()) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, options);
      for (int i = 0; i < 3; ++i) {
        zero(parameters, i % 2 == 0);
        const at::Tensor one = reducer.prepare_for_backward({squares(parameters, 1 + self.rank)}).at(0);
        const at::Tensor two = reducer.prepare_for_backward({squares(parameters, 3 + self.rank)}).at(0);
        (one + two).backward();
        for (const auto& parameter : parameters)
          expect_close(parameter.grad(), parameter.detach() * (3 + 7), 1e-6);
      }
      EXPECT_EQ(reducer.stats().reductions, 3U);
    });
  }
}

TEST(OneForward, MayRunBackwardTwice) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor loss = reducer.prepare_for_backward({squares(parameters, 1 + self.rank)}).at(0);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_close(parameters[0].grad(), parameters[0].detach() * 6, 1e-6);
  });
}

// peer: ddp `ignored_output` (+with_unused_parameters): same
TEST(OneForward, WithoutABackwardIsLegal) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    for (int i = 0; i < 3; ++i) {
      zero(parameters, true);
      const Tensors ignored = reducer.prepare_for_backward({squares(parameters, 7)});
      step(reducer, squares(parameters, 1 + self.rank));
      expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
    }
  });
}

// peer: ddp `multiple_outputs_multiple_backward` (+grad_is_view): differs: must be enabled
//   (`partial_backward`); otherwise a forgotten parameter fails immediately
TEST(PartialBackward, OverSeveralOutputsMakesOneReduction) {
  for (const bool find_unused : {false, true}) {
    on_ranks(2, [&](const Rank& self) {
      Tensors parameters{leaf({3}), leaf({4})};
      Tensors all = parameters;
      if (find_unused) all.push_back(leaf({2}));
      Reducer reducer(named(all), self.group,
                      {.find_unused_parameters = find_unused, .partial_backward = true});
      for (int i = 0; i < 3; ++i) {
        zero(parameters, true);
        const Tensors outputs = reducer.prepare_for_backward(
            {squares({parameters[0]}, 1 + self.rank), squares({parameters[1]}, 1 + self.rank)});
        outputs[i % 2].backward();
        outputs[1 - i % 2].backward();
        for (const auto& parameter : parameters) expect_close(parameter.grad(), parameter.detach() * 3, 1e-6);
      }
      EXPECT_EQ(reducer.stats().reductions, 3U);
    });
  }
}

TEST(PartialBackward, ThatIsNotFinishedFailsTheNextForwardByName) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group, {.partial_backward = true});
    const Tensors outputs =
        reducer.prepare_for_backward({squares({parameters[0]}, 1), squares({parameters[1]}, 1)});
    outputs[0].backward();
    const std::string text = error_text([&] { reducer.prepare_for_backward({squares(parameters, 1)}); });
    EXPECT_NE(text.find("'p1'"), std::string::npos) << text;
    zero(parameters, true);
    step(reducer, squares(parameters, 1 + self.rank));
    expect_close(parameters[1].grad(), parameters[1].detach() * 3, 1e-6);
  });
}

// peer: ddp multiple_outputs_multiple_backward
TEST(PartialBackward, ThatIsNotAllowedFailsAtOnce) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group);
    const Tensors outputs =
        reducer.prepare_for_backward({squares({parameters[0]}, 1), squares({parameters[1]}, 1)});
    const std::string text = error_text([&] { outputs[0].backward(); });
    EXPECT_NE(text.find("partial_backward"), std::string::npos) << text;
  });
}

TEST(UnwrappedBackward, ThrowsByNameWhenAskedTo) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer strict(named(parameters), self.group, {.unwrapped_backward = OnUnreducedBackward::kThrow});
    const std::string text = error_text([&] { squares(parameters, 1).backward(); });
    EXPECT_NE(text.find("'p0'"), std::string::npos) << text;
    zero(parameters, true);
    step(strict, squares(parameters, 1 + self.rank));
    expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
  });
}

TEST(UnwrappedBackward, WarnsOnceOrNever) {
  for (const OnUnreducedBackward reaction : {OnUnreducedBackward::kWarnOnce, OnUnreducedBackward::kIgnore}) {
    ::testing::internal::CaptureStderr();
    on_ranks(2, [&](const Rank& self) {
      self.runtime.log.set_level(LogLevel::kWarning);
      const Tensors parameters{leaf({3})};
      Reducer reducer(named(parameters), self.group, {.unwrapped_backward = reaction});
      for (int i = 0; i < 2; ++i) squares(parameters, 1 + self.rank).backward();
      expect_close(parameters[0].grad(), parameters[0].detach() * (4 * (1 + self.rank)), 1e-6);
    });
    const std::string text = ::testing::internal::GetCapturedStderr();
    std::size_t warnings = 0;
    for (auto at = text.find("the replicas diverge"); at != std::string::npos;
         at = text.find("the replicas diverge", at + 1))
      ++warnings;
    EXPECT_EQ(warnings, reaction == OnUnreducedBackward::kIgnore ? 0u : 2u) << text;
  }
}

// peer: ddp (documented) parameters used outside of the forward: same
TEST(ParametersUsedOutsideOfTheForward, AreReducedWithTheOthers) {
  for (const bool only : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, {.unwrapped_backward = OnUnreducedBackward::kThrow});
      for (int i = 0; i < 3; ++i) {
        zero(parameters, i % 2 == 0);
        const at::Tensor inside =
            only ? squares({parameters[0]}, 1 + self.rank) : squares(parameters, 1 + self.rank);
        const at::Tensor output = reducer.prepare_for_backward({inside}).at(0);
        const at::Tensor penalty = squares({parameters[1]}, 5 + self.rank);
        (i == 0 ? penalty + output : output + penalty).backward();
        expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
        expect_close(parameters[1].grad(), parameters[1].detach() * (only ? 11 : 14), 1e-6);
      }
    });
  }
}

// peer: ddp (documented) parameters that change after construction: better: the error names the parameter
// peer: ddp (Horovod) `dynamic_requires_grad`: differs: the module is wrapped again
TEST(FrozenParameters, ThatThawAreRefusedByName) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4}).set_requires_grad(false)};
    Reducer reducer(named(parameters), self.group);
    step(reducer, squares({parameters[0]}, 1));
    parameters[1].set_requires_grad(true);
    const std::string text = error_text([&] { reducer.prepare_for_backward({squares(parameters, 1)}); });
    EXPECT_NE(text.find("'p1'"), std::string::npos) << text;
  });
}

TEST(FrozenParameters, ThatWereTrainableWhenWrappedAreNamed) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group);
    step(reducer, squares(parameters, 1 + self.rank));
    zero(parameters, true);
    if (self.rank == 1) parameters[1].set_requires_grad(false);
    const std::string text = error_text([&] { step(reducer, squares(parameters, 1)); });
    EXPECT_NE(text.find("'p1' was frozen after it was wrapped"), std::string::npos) << text;
    EXPECT_EQ(text.find("dtype"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 1 gave up") != std::string::npos, self.rank == 0) << text;
    parameters[1].set_requires_grad(true);
    zero(parameters, true);
    step(reducer, squares(parameters, 1 + self.rank));
    expect_close(parameters[1].grad(), parameters[1].detach() * 3, 1e-6);
  });
}

TEST(FrozenParameters, MayChangeBetweenStepsWithFindUnusedParameters) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      DataParallelOptions options = kFindUnused;
      options.gradient_as_bucket_view = view;
      Reducer reducer(named(parameters), self.group, options);
      for (int i = 0; i < 6; ++i) {
        zero(parameters, true);
        const bool frozen = i / 2 == 1;
        parameters[1].set_requires_grad(!frozen);
        step(reducer, squares(parameters, 1 + self.rank));
        expect_close(parameters[0].grad(), parameters[0].detach() * 3, 1e-6);
        EXPECT_EQ(parameters[1].grad().defined(), !frozen);
        if (!frozen) {
          expect_close(parameters[1].grad(), parameters[1].detach() * 3, 1e-6);
        }
      }
    });
  }
}

}  // namespace
}  // namespace torchspan::data_parallel::unused_test
