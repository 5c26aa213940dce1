#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "data_parallel/toy_model.h"
#include "tests/support/local_backward.h"

namespace torchspan::data_parallel::reducer_test {
namespace {

using namespace testing;

Tensors random_parameters(std::mt19937& random) {
  Tensors parameters;
  const auto up_to = [&](std::int64_t most) { return 1 + static_cast<std::int64_t>(random()) % most; };
  const std::int64_t count = up_to(12);
  for (std::int64_t i = 0; i < count; ++i) {
    const at::ScalarType dtype = random() % 3 == 0 ? at::kDouble : at::kFloat;
    switch (random() % 4) {
      case 0:
        parameters.push_back(leaf({}, dtype));
        break;
      case 1:
        parameters.push_back(leaf({up_to(20)}, dtype));
        break;
      case 2:
        parameters.push_back(leaf({up_to(5), up_to(7)}, dtype));
        break;
      default:
        parameters.push_back(leaf({3, 4}, dtype).detach().t().set_requires_grad(true));  // not row-major
    }
  }
  return parameters;
}

// peer: ddp single_dtype_single_bucket, multi_dtype_multi_bucket, forward_backward: same
// peer: ddp grad_layout_*, channels_last_contig: same: gradients have the parameter's strides
// peer: ddp find_unused_parameters_when_unused_parameters_empty: same
// peer: ddp (documented) gradients that are views
TEST(Reducer, OverRandomModelsAveragesLikeOneProcess) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int size = 1 + static_cast<int>(random() % 4);
    DataParallelOptions options;
    options.bucket_cap_mb = (1 + random() % 200) / 1048576.0;
    options.first_bucket_mb = (1 + random() % 100) / 1048576.0;
    options.gradient_as_bucket_view = random() % 2 == 0;
    options.static_graph = random() % 3 == 0;
    options.find_unused_parameters = random() % 3 == 0;
    const bool to_none = random() % 2 == 0;
    const auto shapes = static_cast<unsigned>(random());
    PerRank<Tensors> gradients(size);
    on_ranks(
        size,
        [&](const Rank& self) {
          std::mt19937 same(shapes);
          const Tensors parameters = random_parameters(same);
          Reducer reducer(named(parameters), self.group, options);
          for (int i = 0; i < 4; ++i) {
            zero(parameters, to_none);
            const Tensors wanted = expected(parameters, size, i);
            step(reducer, loss_of(parameters, self.rank, i));
            for (std::size_t p = 0; p < parameters.size(); ++p) {
              const at::Tensor gradient = parameters[p].grad();
              expect_close(gradient, wanted[p], tolerance(gradient.scalar_type()));
              EXPECT_EQ(gradient.strides(), parameters[p].strides());
              gradients[self.rank].push_back(gradient.clone());
            }
          }
          EXPECT_EQ(reducer.stats().reductions, 4U);
        },
        seed);
    for (int rank = 1; rank < size; ++rank) {
      ASSERT_EQ(gradients[rank].size(), gradients[0].size());
      for (std::size_t i = 0; i < gradients[0].size(); ++i)
        EXPECT_TRUE(at::equal(gradients[rank][i], gradients[0][i])) << "not the same bits";
    }
  }
}

// peer: ddp (documented) gradients that are views
TEST(Reducer, WithoutZeroingAddsAveragesToExistingGradients) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group);
    Tensors sums = expected(parameters, 2, 0);
    for (std::size_t p = 0; p < 2; ++p) sums[p] = sums[p] + expected(parameters, 2, 1)[p];
    for (int i = 0; i < 2; ++i) step(reducer, loss_of(parameters, self.rank, i));
    for (std::size_t p = 0; p < 2; ++p) expect_close(parameters[p].grad(), sums[p], 1e-6);
  });
}

// peer: ddp (C++ only) gradients in an autograd context: better
TEST(Reducer, WorksOverAnAutogradContext) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({2, 2})};
    Reducer reducer(named(parameters), self.group);
    std::vector<engine::GradientMap> contexts(3);
    for (int i = 0; i < 3; ++i) {
      engine::MapSink sink(contexts[i]);
      engine::backward(reducer.prepare_for_backward({loss_of(parameters, self.rank, i)}), {}, sink);
    }
    for (int i = 0; i < 3; ++i) {  // afterwards: a later pass must not have changed an earlier context
      for (std::size_t p = 0; p < 2; ++p)
        expect_close(contexts[i].gradient(parameters[p]), expected(parameters, 2, i)[p], 1e-6);
    }
    EXPECT_FALSE(parameters[0].grad().defined());
  });
}

// peer: ddp (documented) gradients that are views: `detach_()`, set to none, zeroed: same; `detach_()` does
//   not throw
TEST(Reducer, PointsGradientsIntoBucketsByDefault) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      const Tensors parameters{leaf({3}), leaf({4})};
      Reducer reducer(named(parameters), self.group, {.gradient_as_bucket_view = view});
      step(reducer, loss_of(parameters, self.rank, 0));
      const auto* storage = parameters[0].grad().storage().unsafeGetStorageImpl();
      EXPECT_EQ(storage == parameters[1].grad().storage().unsafeGetStorageImpl(), view);
      const void* memory = parameters[0].grad().data_ptr();
      zero(parameters, false);
      step(reducer, loss_of(parameters, self.rank, 1));
      EXPECT_EQ(parameters[0].grad().data_ptr(), memory);
      EXPECT_NO_THROW(parameters[0].grad().detach_()) << "optimizers do so";
    });
  }
}

// peer: ddp `fp16` (+grad_is_view): division before the sum: same
TEST(Reducer, DoesNotOverflowHalf) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{at::ones({4}, at::kHalf).set_requires_grad(true)};
    Reducer reducer(named(parameters), self.group);
    const at::Tensor factor = at::full({4}, 32768.0, at::kHalf);
    const at::Tensor output = reducer.prepare_for_backward({parameters[0] * factor}).at(0);
    output.backward(at::ones({4}, at::kHalf));
    EXPECT_TRUE(at::equal(parameters[0].grad(), factor));
  });
}

// peer: ddp `ddp_complex_params`, mixed complex and real parameters: same
TEST(Reducer, AveragesComplexGradientsInBucketsOfTheirOwn) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({2}, at::kComplexFloat)};
    Reducer reducer(named(parameters), self.group);
    EXPECT_EQ(reducer.stats().bucket_parameters.size(), 2U);
    for (int i = 0; i < 2; ++i) {
      zero(parameters, false);
      step(reducer, (at::view_as_real(parameters[1]).sum() + parameters[0].sum()) * (1 + self.rank));
      expect_close(parameters[0].grad(), at::full({3}, 1.5), 1e-6);
      expect_close(at::view_as_real(parameters[1].grad()), at::full({2, 2}, 1.5), 1e-6);
    }
  });
}

// peer: ddp bucket_cap_mb_alone: same
TEST(Reducer, RebuildsBucketsInTheOrderOfRankZerosGradients) {
  on_ranks(3, [](const Rank& self) {
    Tensors parameters;
    for (int i = 0; i < 6; ++i) parameters.push_back(leaf({10}));
    Reducer reducer(named(parameters), self.group,
                    {.bucket_cap_mb = 80 / 1048576.0, .first_bucket_mb = 40 / 1048576.0});
    EXPECT_EQ(reducer.stats().bucket_parameters[0], std::vector<std::string>{"p5"});
    const auto chain = [&] {  // gradients arrive in the order 2 1 0 3 4 5 on rank 0, reversed on the others
      std::vector<int> order{5, 4, 3, 0, 1, 2};
      if (self.rank != 0) std::reverse(order.begin(), order.end());
      at::Tensor value = at::ones({10});
      for (const int i : order) value = (value * parameters[i]).sin();
      return value.sum();
    };
    step(reducer, chain());
    const ReducerStats stats = reducer.stats();
    EXPECT_TRUE(stats.rebuilt);
    EXPECT_EQ(stats.bucket_parameters,
              (std::vector<std::vector<std::string>>{{"p2"}, {"p1", "p0"}, {"p3", "p4"}, {"p5"}}));
    const at::Tensor before = parameters[3].grad().clone();
    zero(parameters, false);
    step(reducer, chain());
    EXPECT_TRUE(at::equal(parameters[3].grad(), before));
    EXPECT_EQ(reducer.stats().bucket_parameters, stats.bucket_parameters);
  });
}

TEST(Reducer, KeepsItsFirstBucketsIfAsked) {
  on_ranks(2, [](const Rank& self) {
    Tensors parameters;
    for (int i = 0; i < 4; ++i) parameters.push_back(leaf({10}));
    Reducer reducer(
        named(parameters), self.group,
        {.bucket_cap_mb = 40 / 1048576.0, .first_bucket_mb = 40 / 1048576.0, .rebuild_buckets = false});
    const auto before = reducer.stats().bucket_parameters;
    for (int i = 0; i < 2; ++i) {
      at::Tensor value = at::ones({10});  // gradients arrive in the order of the parameters
      for (int p = 3; p >= 0; --p) value = (value * parameters[static_cast<std::size_t>(p)]).sin();
      step(reducer, value.sum());
      zero(parameters, false);
    }
    EXPECT_FALSE(reducer.stats().rebuilt);
    EXPECT_EQ(reducer.stats().bucket_parameters, before);
  });
}

// peer: ddp bucket_cap_mb_list_initialization, _default_behavior: same: the last value applies to all further
//   buckets; the ranks' lists are compared
TEST(Reducer, TakesTheCapacityOfEachBucketFromAList) {
  on_ranks(2, [](const Rank& self) {
    Tensors parameters;
    for (int i = 0; i < 7; ++i) parameters.push_back(leaf({10}));
    const std::vector<double> capacities{80 / 1048576.0, 40 / 1048576.0, 120 / 1048576.0};
    Reducer reducer(named(parameters), self.group,
                    {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6, .bucket_cap_mb_list = capacities});
    EXPECT_EQ(reducer.stats().bucket_bytes, (std::vector<std::size_t>{80, 40, 120, 40}));
    for (int i = 0; i < 3; ++i) {
      zero(parameters, i % 2 == 0);
      const Tensors wanted = expected(parameters, 2, i);
      step(reducer, loss_of(parameters, self.rank, i));
      for (std::size_t p = 0; p < parameters.size(); ++p) expect_close(parameters[p].grad(), wanted[p], 1e-6);
    }
    EXPECT_TRUE(reducer.stats().rebuilt);
    EXPECT_EQ(reducer.stats().bucket_bytes, (std::vector<std::size_t>{80, 40, 120, 40}));
    const auto refused = [&](std::vector<double> list) {
      return error_text(
          [&] { Reducer wrong(named(parameters), self.group, {.bucket_cap_mb_list = std::move(list)}); });
    };
    EXPECT_NE(refused({1, 0}).find("bucket_cap_mb_list[1] is 0"), std::string::npos);
    EXPECT_NE(refused({self.rank + 1.0}).find("bucket_cap_mb_list is [1] on rank 0 and [2] on rank 1"),
              std::string::npos);
  });
}

// peer: ddp ddp_unused_params_rebuild_buckets_exception, ddp_multiple_nested_unused_params_error: better:
//   at the end of the same backward, and the reducer stays usable
TEST(Reducer, NamesParametersWithoutGradientsAtTheEndOfTheSameBackwardAndGoesOn) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4}), leaf({2})};
    Reducer reducer(named(parameters), self.group);
    const std::string text = error_text([&] { step(reducer, loss_of({parameters[1]}, self.rank, 0)); });
    EXPECT_NE(text.find("'p0', 'p2'"), std::string::npos) << text;
    EXPECT_NE(text.find("find_unused_parameters"), std::string::npos) << text;
    for (int i = 0; i < 2; ++i) {
      zero(parameters, true);
      step(reducer, loss_of(parameters, self.rank, i));
      for (std::size_t p = 0; p < 3; ++p)
        expect_close(parameters[p].grad(), expected(parameters, 2, i)[p], 1e-6);
    }
  });
}

// peer: ddp (documented) a rank that dies
TEST(Reducer, WhenOneRankIsIncompleteNamesItsParametersOnTheOthers) {
  on_ranks(3, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group);
    const std::string text = error_text([&] {
      step(reducer, self.rank == 1 ? loss_of({parameters[1]}, 1, 0) : loss_of(parameters, self.rank, 0));
    });
    EXPECT_NE(text.find("'p0'"), std::string::npos) << text;
    if (self.rank != 1) {
      EXPECT_NE(text.find("rank 1 gave up"), std::string::npos) << text;
    }
    zero(parameters, true);
    step(reducer, loss_of(parameters, self.rank, 0));
    expect_close(parameters[0].grad(), expected(parameters, 3, 0)[0], 1e-6);
  });
}

/// One rank's backward throws before or after it sent some of its buckets. Then gradients are zeroed in place,
/// where the other ranks' reduction must not write any more, or set to none.
void survive_a_throwing_backward(bool early, bool to_none, bool view, std::uint64_t seed) {
  const auto body = [=](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4}), leaf({5})};
    Reducer reducer(named(parameters), self.group,
                    {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6, .gradient_as_bucket_view = view});
    step(reducer, loss_of(parameters, self.rank, 7));
    at::Tensor inner = (parameters[early ? 2 : 0] * 2).sin();
    if (self.rank == 1) {
      inner.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the gradient exploded"); });
    }
    const at::Tensor loss =
        inner.sum() + loss_of({parameters[1], parameters[early ? 0 : 2]}, self.rank, 0).to(at::kFloat);
    if (self.rank == 1) {
      EXPECT_THROW(step(reducer, loss), std::runtime_error);
    } else {
      const std::string text = error_text([&] { step(reducer, loss); });
      EXPECT_NE(text.find("rank 1 gave up its backward pass"), std::string::npos) << text;
    }
    EXPECT_EQ(reducer.stats().aborted, 1U);
    for (int i = 0; i < 3; ++i) {
      zero(parameters, to_none);
      step(reducer, loss_of(parameters, self.rank, i));
      for (std::size_t p = 0; p < 3; ++p)
        expect_close(parameters[p].grad(), expected(parameters, 2, i)[p], 1e-6);
    }
  };
  on_ranks(2, body, seed);
}

// peer: ddp failure_recovery
TEST(Reducer, SurvivesABackwardThatThrowsOnOneRank) {
  for (unsigned seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(seed);
    survive_a_throwing_backward(seed & 1, seed & 2, seed & 4, seed);
  }
}

// peer: ddp (documented) a rank that dies, is late, or throws: better: the error names rank, operation and
//   reason, also for uneven inputs without `join`
TEST(Reducer, FailsEverywhereWhenARankDies) {
  if (over_shared_memory()) GTEST_SKIP() << "needs a rank that can die alone";
  on_ranks(3, [](const Rank& self) {
    const Tensors parameters{leaf({3})};
    Reducer reducer(named(parameters), self.group);
    step(reducer, loss_of(parameters, self.rank, 0));
    if (self.rank == 2) return self.die();
    const std::string text = error_text([&] { step(reducer, loss_of(parameters, self.rank, 1)); });
    EXPECT_NE(text.find("rank 2 died"), std::string::npos) << text;
  });
}

// peer: ddp (documented) a rank that dies
TEST(Reducer, NamesTheRankThatIsLate) {
  if (over_shared_memory()) GTEST_SKIP() << "needs a clock that jumps";
  on_ranks(2,
           [](const Rank& self) {
             const Tensors parameters{leaf({3})};
             Reducer reducer(named(parameters), self.group);
             step(reducer, loss_of(parameters, self.rank, 0));
             if (self.rank == 1) return self.runtime.executor.sleep(std::chrono::seconds(60));
             const std::string text = error_text([&] { step(reducer, loss_of(parameters, self.rank, 1)); });
             EXPECT_NE(text.find("rank 1 did not reach"), std::string::npos) << text;
             EXPECT_NE(text.find("in reduction 2, bucket 0 of 1 (with 'p0')"), std::string::npos) << text;
             EXPECT_NE(text.find("fewer batches than the others"), std::string::npos) << text;
             EXPECT_NE(text.find("join()"), std::string::npos) << text;
           },
           1, {.timeout = std::chrono::seconds(5)});
}

// peer: ddp failure_recovery: better: the same reducer continues after a failed backward
TEST(Reducer, ThatIsDestroyedLeavesTheParametersToTheNext) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    for (int life = 0; life < 3; ++life) {
      Reducer reducer(named(parameters), self.group);
      for (int i = 0; i < 6; ++i) {
        zero(parameters, true);
        step(reducer, loss_of(parameters, self.rank, i));
        expect_close(parameters[1].grad(), expected(parameters, 2, i)[1], 1e-6);
      }
    }
    zero(parameters, true);
    loss_of(parameters, self.rank, 0).backward();
    expect_close(parameters[0].grad(), (1 + self.rank) * (parameters[0].detach() * (1 + self.rank)).cos(),
                 1e-6);
  });
}

// peer: ddp (1.x) several replicas in one process: same as PyTorch 1.x; later releases have one replica
TEST(Reducer, SumsReplicasOfOneProcessAndAveragesOverRanks) {
  on_ranks(2, [](const Rank& self) {
    const Tensors first{leaf({3}), leaf({2})}, second{leaf({3}), leaf({2})};
    Reducer reducer(Reducer::Replicas{named(first), named(second)}, self.group);
    step(reducer, loss_of(first, 2 * self.rank, 0) + loss_of(second, 2 * self.rank + 1, 0));
    for (std::size_t p = 0; p < 2; ++p) {
      expect_close(first[p].grad(), expected(first, 4, 0)[p] * 2, 1e-6);
      EXPECT_TRUE(at::equal(first[p].grad(), second[p].grad()));
      EXPECT_NE(first[p].grad().data_ptr(), second[p].grad().data_ptr());
    }
  });
}

// peer: ddp ddp_logging_data_cpu, ddp_comm_hook_logging, ddp_python_error_logged, ddp_profiling_*,
//   ddp_build_debug_param_to_name_mapping: same in kind: a struct, spans, and errors that always name
//   parameters
TEST(Reducer, KeepsStatisticsAndSpans) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3}), leaf({4})};
    Reducer reducer(named(parameters), self.group, {.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
    reducer.begin_forward();
    self.runtime.executor.sleep(std::chrono::milliseconds(7));
    step(reducer, loss_of(parameters, self.rank, 0));
    const ReducerStats stats = reducer.stats();
    EXPECT_EQ(stats.forwards, 1U);
    EXPECT_EQ(stats.reductions, 1U);
    EXPECT_GE(stats.forward, std::chrono::milliseconds(7));
    EXPECT_EQ(stats.measured, 1U);
    EXPECT_GE(stats.communication, stats.overlap);
    EXPECT_EQ(stats.gradient_order.size(), 2U);
    EXPECT_EQ(stats.bucket_bytes.size(), 2U);
    std::vector<std::string> names;
    for (const SpanRecord& span : self.runtime.spans.snapshot()) names.emplace_back(span.name.data());
    for (const char* wanted : {"forward", "backward", "bucket 0", "bucket 1", "reduction"})
      EXPECT_NE(std::find(names.begin(), names.end(), wanted), names.end()) << wanted;
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::reducer_test
