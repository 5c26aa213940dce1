#include <gtest/gtest.h>

#include <torchspan/core/error.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::hooks_test {
namespace {

using namespace testing;

const DataParallelOptions kSmall{.bucket_cap_mb = 20 / 1048576.0, .first_bucket_mb = 8 / 1048576.0};

void expect_average(CommHook (*make)(), double tolerance) {
  on_ranks(3, [&](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4}, at::kDouble), leaf({2, 2}), leaf({5})};
    Reducer reducer(named(parameters), self.group, kSmall);
    reducer.register_comm_hook(make(), "the hook");
    for (int i = 0; i < 3; ++i) {
      zero(parameters, i % 2 == 0);
      const Tensors wanted = expected(parameters, 3, i);
      step(reducer, loss_of(parameters, self.rank, i));
      for (std::size_t p = 0; p < parameters.size(); ++p)
        expect_close(parameters[p].grad(), wanted[p], tolerance);
    }
  });
}

// peer: ddp `ddp_comm_hook_future_passing_cpu`, `_allreduce_hook` (+view, +static),
//   `_allreduce_with_then_hook`, `ddp_hook_parity_allreduce`, `_allreduce_process_group`: same
TEST(Hook, AllReduceIsTheDefaultToTheBit) {
  PerRank<Tensors> with(2), without(2);
  for (const bool hooked : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({40})};
      Reducer reducer(named(parameters), self.group, kSmall);
      if (hooked) reducer.register_comm_hook(all_reduce_hook(), "all_reduce");
      step(reducer, loss_of(parameters, self.rank, 0));
      for (const auto& parameter : parameters)
        (hooked ? with : without)[self.rank].push_back(parameter.grad().clone());
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t p = 0; p < 2; ++p) EXPECT_TRUE(at::equal(with[rank][p], without[rank][p]));
  }
}

// peer: ddp default_ddp_comm_hooks, builtin_ddp_comm_hooks, fp16_compress_wrapper, bf16_compress_wrapper:
//   same
TEST(Hook, OfHalfAveragesToItsPrecision) { expect_average(fp16_compress_hook, 4e-3); }
// peer: ddp default_ddp_comm_hooks
TEST(Hook, OfBfloat16AveragesToItsPrecision) { expect_average(bf16_compress_hook, 3e-2); }

// peer: ddp default_ddp_comm_hooks
TEST(Hook, WrapperShowsTheInnerHookNarrowGradientsOfTheSameShapes) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({2, 2})};
    Reducer reducer(named(parameters), self.group);
    int calls = 0;
    reducer.register_comm_hook(
        fp16_compress_wrapper([&](const GradientBucket& bucket, const collective::Group& group) {
          ++calls;
          EXPECT_EQ(bucket.buffer.scalar_type(), at::kHalf);
          EXPECT_EQ(bucket.gradients.size(), 2U);
          for (std::size_t i = 0; i < 2; ++i) {
            EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameter_tensors[i].sizes());
            EXPECT_TRUE(bucket.gradients[i].is_alias_of(bucket.buffer));
          }
          return all_reduce_hook()(bucket, group);
        }),
        "wrapped");
    step(reducer, loss_of(parameters, self.rank, 0));
    EXPECT_EQ(calls, 1);
    for (std::size_t p = 0; p < 2; ++p)
      expect_close(parameters[p].grad(), expected(parameters, 2, 0)[p], 4e-3);
  });
}

// peer: ddp ddp_comm_hook_future_passing_cpu
TEST(Hook, MayReturnAnotherTensorLater) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({2, 2})};
      DataParallelOptions options = kSmall;
      options.gradient_as_bucket_view = view;
      Reducer reducer(named(parameters), self.group, options);
      std::vector<std::size_t> seen;
      reducer.register_comm_hook(
          [&](const GradientBucket& bucket, const collective::Group& group) {
            seen.push_back(bucket.index);
            EXPECT_EQ(bucket.is_last, bucket.index == 1);
            return group.all_reduce(bucket.buffer.clone()).then([](const Future<at::Tensor>& sum) {
              return sum.wait() * 10;
            });
          },
          "ten times");
      for (int i = 0; i < 2; ++i) {
        zero(parameters, true);
        step(reducer, loss_of(parameters, self.rank, i));
        for (std::size_t p = 0; p < 2; ++p)
          expect_close(parameters[p].grad(), expected(parameters, 2, i)[p] * 20, 1e-5);
      }
      EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1, 0, 1}));
    });
  }
}

// peer: ddp sparse_gradients
TEST(Hook, OfSparseGradientsAveragesThem) {
  on_ranks(2, [](const Rank& self) {
    auto list = named({leaf({4, 2})});
    list[0].sparse_gradient = true;
    Reducer reducer(list, self.group);
    reducer.register_comm_hook(fp16_compress_hook(), "fp16");
    step(reducer,
         at::embedding(list[0].tensor, at::tensor(std::vector<std::int64_t>{self.rank}), -1, false, true)
             .sum());
    at::Tensor wanted = at::zeros({4, 2});
    wanted.narrow(0, 0, 2).fill_(0.5);
    expect_close(list[0].tensor.grad(), wanted, 1e-6);
  });
}

/// Otherwise `.grad` would become undefined or dense silently.
TEST(Hook, ThatReturnsAnotherTensorForASparseGradientFailsTheBackward) {
  for (const int kind : {0, 1, 2, 3}) {
    on_ranks(2, [&](const Rank& self) {
      auto list = named({leaf({4, 2})});
      list[0].sparse_gradient = true;
      Reducer reducer(list, self.group);
      reducer.register_comm_hook(
          [kind](const GradientBucket& bucket, const collective::Group& group) {
            return group.all_reduce(bucket.buffer).then([kind](const Future<at::Tensor>& sum) {
              if (kind == 0) return at::Tensor();
              if (kind == 1) return sum.wait().to_dense();
              return kind == 2 ? sum.wait().to(at::kDouble) : at::zeros({3, 2}).to_sparse();
            });
          },
          "nonsense");
      const at::Tensor row = at::tensor(std::vector<std::int64_t>{self.rank});
      const std::string text =
          error_text([&] { step(reducer, at::embedding(list[0].tensor, row, -1, false, true).sum()); });
      EXPECT_NE(text.find("the result of the communication hook for bucket 0"), std::string::npos) << text;
      EXPECT_NE(text.find("it must be a sparse tensor [4, 2] of Float"), std::string::npos) << text;
    });
  }
}

// peer: ddp ddp_comm_hook_register_just_once, ddp_invalid_comm_hook_init: better: rejected if ranks differ
TEST(Hook, IsSetOnceBeforeTheFirstBackwardAndTheSameEverywhere) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    const std::string differs = error_text(
        [&] { reducer.register_comm_hook(all_reduce_hook(), self.rank == 0 ? "one" : "another"); });
    EXPECT_NE(differs.find("'another'"), std::string::npos) << differs;
    EXPECT_NE(error_text([&] { reducer.register_comm_hook(nullptr, "none"); }).find("empty"),
              std::string::npos);
    reducer.register_comm_hook(all_reduce_hook(), "one");
    EXPECT_NE(error_text([&] { reducer.register_comm_hook(all_reduce_hook(), "one"); }).find("already"),
              std::string::npos);
    Reducer late(named(parameters), self.group);
    {
      const at::Tensor loss =
          reducer.prepare_for_backward(late.prepare_for_backward({loss_of(parameters, self.rank, 0)})).at(0);
      loss.backward();
    }
    EXPECT_NE(error_text([&] {
                late.register_comm_hook(all_reduce_hook(), "late");
              }).find("before the first backward"),
              std::string::npos);
  });
}

/// On all ranks at once; a rank that throws ends the group, possibly before another rank begins.
// peer: ddp ddp_invalid_comm_hook_return_type: better: a failed hook fails the step on all ranks
TEST(Hook, ThatThrowsOrReturnsAnInvalidTensorFailsTheBackward) {
  for (const int kind : {0, 1, 2, 3}) {
    on_ranks(2, [&](const Rank& self) {
      const auto hook = [&](const GradientBucket& bucket,
                            const collective::Group& group) -> Future<at::Tensor> {
        if (kind == 0) throw Error(ErrorKind::kInvalid, "no hook today");
        if (kind == 1) return {};
        return group.all_reduce(bucket.buffer).then([&](const Future<at::Tensor>&) {
          return kind == 2 ? at::Tensor() : at::zeros({7});
        });
      };
      const std::string text = error_text([&] {
        const Tensors parameters{leaf({3})};
        Reducer reducer(named(parameters), self.group);
        reducer.register_comm_hook(hook, "nonsense");
        step(reducer, loss_of(parameters, self.rank, 0));
      });
      const std::string wanted = kind == 0   ? "no hook today"
                                 : kind == 1 ? "hook returned an empty future"
                                             : "result of the communication hook for bucket 0";
      EXPECT_NE(text.find(wanted), std::string::npos) << text;
    });
  }
}

// peer: ddp ddp_invalid_comm_hook_return_type
TEST(Hook, ThatFailsOnOneRankFailsTheStepOnAllAndTheNextOneWorks) {
  for (const bool nonsense : {true, false}) {
    on_ranks(3, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, kSmall);
      int calls = 0;
      reducer.register_comm_hook(
          [&](const GradientBucket& bucket, const collective::Group& group) {
            const bool fails = self.rank == 1 && ++calls == 1;
            bucket.buffer.div_(3);
            return group.all_reduce(bucket.buffer).then([=](const Future<at::Tensor>& sum) {
              if (fails && !nonsense) throw std::runtime_error("out of paper");
              return fails ? at::zeros({7}) : sum.wait();
            });
          },
          "fails once");
      std::string text;
      try {
        step(reducer, loss_of(parameters, self.rank, 0));
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_NE(text.find(nonsense ? "result of the communication hook for bucket 0" : "out of paper"),
                std::string::npos)
          << text;
      EXPECT_EQ(text.find("rank 1 gave up") == std::string::npos, self.rank == 1) << text;
      zero(parameters, false);
      step(reducer, loss_of(parameters, self.rank, 1));
      for (std::size_t p = 0; p < 2; ++p)
        expect_close(parameters[p].grad(), expected(parameters, 3, 1)[p], 1e-6);
    });
  }
}

// peer: ddp ddp_comm_hook_future_passing_cpu
TEST(Hook, GivesTheAverageUnderEveryOptionAndOverASeparateGroup) {
  for (unsigned bits = 0; bits < 16; ++bits) {
    SCOPED_TRACE(bits);
    DataParallelOptions options = kSmall;
    options.gradient_as_bucket_view = bits & 1;
    options.static_graph = bits & 2;
    options.find_unused_parameters = bits & 4;
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4}, at::kDouble), leaf({2, 2})};
      const collective::Group own = self.group.split(0, self.rank);
      Reducer reducer(named(parameters), self.group, options);
      reducer.register_comm_hook(
          [&](const GradientBucket& bucket, const collective::Group& group) {
            return (bits & 8 ? own : group).all_reduce(bucket.buffer).then([](const Future<at::Tensor>& sum) {
              return sum.wait() / 2;
            });
          },
          "halves");
      for (int i = 0; i < 4; ++i) {
        zero(parameters, i % 2 == 0);
        const Tensors wanted = expected(parameters, 2, i);
        step(reducer, loss_of(parameters, self.rank, i));
        for (std::size_t p = 0; p < parameters.size(); ++p)
          expect_close(parameters[p].grad(), wanted[p], 1e-6);
      }
    });
  }
}

// peer: ddp noop hook: same
TEST(Hook, MayReturnACompletedFuture) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group, kSmall);
    reducer.register_comm_hook(
        [](const GradientBucket& bucket, const collective::Group&) {
          return make_ready_future<at::Tensor>(bucket.buffer);
        },
        "nothing is sent");
    for (int i = 0; i < 2; ++i) {
      zero(parameters, false);
      step(reducer, parameters[0].sum() * (1 + self.rank) + parameters[1].sum());
      expect_close(parameters[0].grad(), at::full({3}, 1.0 + self.rank), 1e-6);
    }
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::hooks_test
