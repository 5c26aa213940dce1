#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "device/api/torch_version.h"
#include "engine/api/compat.h"
#include "engine/api/grad_field_sink.h"
#include "engine/oracle.h"
#include "engine/test_nodes.h"
#include "tests/support/errors.h"

namespace torchspan::engine::sink_test {
namespace {

using namespace testing;
using torch::autograd::impl::grad_accumulator;

Tensor sparse(int64_t row) { return at::sparse_coo_tensor(torch::tensor({{row}}), at::ones({1, 2}), {3, 2}); }

TEST(GradientMap, AdoptsAFirstGradientThatIsNotShared) {
  GradientMap gradients;
  const Tensor parameter = at::zeros({3, 2});
  Tensor gradient = at::ones({3, 2});
  const void* memory = gradient.data_ptr();
  gradients.accumulate(parameter, std::move(gradient));
  EXPECT_EQ(gradients.gradient(parameter).data_ptr(), memory);
}

TEST(GradientMap, CopiesAFirstGradientThatIsShared) {
  const Tensor parameter = at::zeros({3, 2});
  const Tensor held = at::ones({3, 2}), other_view = at::ones({6});
  GradientMap gradients, of_view;
  gradients.accumulate(parameter, held);
  of_view.accumulate(parameter, other_view.view({3, 2}));
  held.fill_(9);
  other_view.fill_(9);
  EXPECT_TRUE(at::equal(gradients.gradient(parameter), at::ones({3, 2})));
  EXPECT_TRUE(at::equal(of_view.gradient(parameter), at::ones({3, 2})));
}

TEST(GradientMap, AdoptsTheUnsharedPartsOfASparseGradient) {
  const Tensor parameter = at::zeros({3, 2});
  for (const bool indices_held : {false, true}) {
    for (const bool values_held : {false, true}) {
      Tensor indices = torch::tensor({{1, 2}}), values = at::ones({2, 2});
      Tensor gradient = at::_sparse_coo_tensor_unsafe(indices, values, {3, 2});
      const void *indices_memory = indices.data_ptr(), *values_memory = values.data_ptr();
      if (!indices_held) indices = Tensor();
      if (!values_held) values = Tensor();
      GradientMap gradients;
      gradients.accumulate(parameter, std::move(gradient));
      const Tensor kept = gradients.gradient(parameter);
      EXPECT_EQ(kept._indices().data_ptr() == indices_memory, !indices_held);
      EXPECT_EQ(kept._values().data_ptr() == values_memory, !values_held);
      EXPECT_TRUE(at::equal(kept.to_dense(), torch::tensor({{0., 0.}, {1., 1.}, {1., 1.}}, at::kFloat)));
    }
  }
}

TEST(GradientMap, CopiesASparseGradientWithSharedIndices) {
  const Tensor parameter = at::zeros({3, 2});
  const Tensor indices = torch::tensor({{1}});
  GradientMap gradients;
  gradients.accumulate(parameter, at::_sparse_coo_tensor_unsafe(indices, at::ones({1, 2}), {3, 2}));
  indices.fill_(2);
  EXPECT_TRUE(at::equal(gradients.gradient(parameter).to_dense().select(0, 1), at::ones({2})));
}

TEST(GradientMap, KeepsTheParametersLayout) {
  GradientMap gradients;
  const Tensor parameter = at::zeros({2, 3}).t();
  gradients.accumulate(parameter, at::ones({3, 2}));
  EXPECT_EQ(gradients.gradient(parameter).strides(), parameter.strides());
}

TEST(GradientMap, NeverChangesAGradientItHandedOut) {
  GradientMap gradients;
  const Tensor parameter = at::zeros({2});
  gradients.accumulate(parameter, at::ones({2}));
  const Tensor before = gradients.gradient(parameter);
  gradients.accumulate(parameter, at::ones({2}));
  EXPECT_TRUE(at::equal(before, at::ones({2})));
  EXPECT_TRUE(at::equal(gradients.gradient(parameter), at::full({2}, 2.0)));
}

TEST(GradientMap, SumsInPlaceInItsMemory) {
  GradientMap gradients;
  const Tensor parameter = at::zeros({2});
  gradients.accumulate(parameter, at::ones({2}));
  const void* memory = gradients.gradient(parameter).data_ptr();
  gradients.accumulate(parameter, at::ones({2}));
  EXPECT_EQ(gradients.gradient(parameter).data_ptr(), memory);
}

TEST(GradientMap, MixesSparseAndDenseInEveryOrder) {
  const Tensor parameter = at::zeros({3, 2});
  for (int code = 0; code < 8; ++code) {
    SCOPED_TRACE(code);
    GradientMap gradients;
    Tensor expected = at::zeros({3, 2});
    bool all_sparse = true;
    for (int step = 0; step < 3; ++step) {
      const Tensor next = (code >> step) & 1 ? at::full({3, 2}, step + 1.0) : sparse(step);
      all_sparse = all_sparse && next.is_sparse();
      expected += next;
      gradients.accumulate(parameter, next);
    }
    const Tensor sum = gradients.gradient(parameter);
    EXPECT_EQ(sum.is_sparse(), all_sparse);
    EXPECT_TRUE(at::equal(sum.is_sparse() ? sum.to_dense() : sum, expected));
  }
}

TEST(GradientMap, ListsParametersInTheOrderOfTheirFirstGradient) {
  GradientMap gradients;
  std::vector<Tensor> parameters;
  for (int i = 0; i < 20; ++i) parameters.push_back(at::zeros({1}));
  for (int i = 19; i >= 0; --i) gradients.accumulate(parameters[i], at::full({1}, i));
  gradients.accumulate(parameters[3], at::ones({1}));
  gradients.accumulate(parameters[5], Tensor());
  const auto list = gradients.gradients();
  ASSERT_EQ(list.size(), 20U);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(list[i].parameter.is_same(parameters[19 - i]));
  gradients.clear();
  EXPECT_EQ(gradients.size(), 0U);
  EXPECT_FALSE(gradients.gradient(parameters[3]).defined());
}

TEST(GradientMap, SumsFromManyThreads) {
  const auto executor = make_executor();
  GradientMap gradients;
  const std::vector<Tensor> parameters{at::zeros({5}), at::zeros({5}), at::zeros({5})};
  {
    std::vector<Thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.push_back(executor->spawn("accumulate", [&] {
        for (int i = 0; i < 300; ++i) gradients.accumulate(parameters[i % 3], at::ones({5}));
      }));
    }
  }
  for (const Tensor& parameter : parameters) {
    EXPECT_TRUE(at::equal(gradients.gradient(parameter), at::full({5}, 400.0)));
  }
}

TEST(PassEnd, HappensWhenTheWorkAndAllHeldFuturesAreDone) {
  const auto executor = make_executor();
  auto pool = std::make_shared<Pool>(*executor, PoolOptions{.threads = 2});
  auto end = std::make_shared<PassEnd>(5);
  Promise<void> first(pool), second(pool);
  std::vector<int> order;
  end->after([&](const PassStatus& status) { order.push_back(status.ok() ? 1 : -1); });
  end->after([&](const PassStatus&) { order.push_back(2); });
  end->hold(first.future());
  end->hold(second.future());
  end->end(nullptr);
  EXPECT_FALSE(end->has_arrived());
  second.set_value();
  EXPECT_FALSE(end->has_arrived());
  first.set_value();
  end->wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_THROW(end->hold(make_ready_future<void>()), Error);
  end->after([&](const PassStatus& status) { order.push_back(static_cast<int>(status.pass)); });
  EXPECT_EQ(order.back(), 5);
  pool->stop();
}

TEST(PassEnd, RefusesAnEmptyFutureAndStillEnds) {
  auto end = std::make_shared<PassEnd>(1);
  EXPECT_EQ(torchspan::testing::kind_of([&] { end->hold(Future<void>()); }), ErrorKind::kInvalid);
  end->end(nullptr);
  EXPECT_TRUE(end->has_arrived());
}

TEST(PassEnd, FailsWithAHeldFutureOrACallback) {
  auto of_future = std::make_shared<PassEnd>(1), of_callback = std::make_shared<PassEnd>(2);
  of_future->hold(
      make_failed_future<void>(std::make_exception_ptr(Error(ErrorKind::kTimedOut, "slow all-reduce"))));
  of_future->end(nullptr);
  EXPECT_THROW(of_future->wait(), Error);

  bool second_failed = false;
  of_callback->after([](const PassStatus&) { throw std::runtime_error("callback"); });
  of_callback->after([&](const PassStatus& status) { second_failed = !status.ok(); });
  of_callback->end(nullptr);
  EXPECT_TRUE(second_failed);
  EXPECT_THROW(of_callback->wait(), std::runtime_error);
}

TEST(PassEnd, CallsTheLastAfterAllOthers) {
  PassEnd end(1);
  std::string order;
  EXPECT_FALSE(end.is_watched());
  end.last([&](const PassStatus& status) { order += status.ok() ? "last" : "last failed"; });
  EXPECT_FALSE(end.is_watched());
  end.after([&](const PassStatus&) {
    order += "other ";
    throw std::runtime_error("a callback broke");
  });
  EXPECT_TRUE(end.is_watched());
  EXPECT_THROW(end.last([](const PassStatus&) {}), Error);
  end.end(nullptr);
  EXPECT_EQ(order, "other last failed");
}

TEST(PassEnd, KeepsTheFirstFailure) {
  auto end = std::make_shared<PassEnd>(1);
  end->end(std::make_exception_ptr(std::logic_error("first")));
  end->end(std::make_exception_ptr(std::runtime_error("second")));
  EXPECT_THROW(end->wait(), std::logic_error);
}

TEST(PassEnd, ReportsTheEndOfTheWorkBeforeItWaitsForHeldFutures) {
  auto end = std::make_shared<PassEnd>(1);
  Promise<void> late({});
  std::vector<std::string> order;
  end->after([&](const PassStatus&) { order.push_back("end"); });
  end->after_work([&](const PassStatus& status) {
    order.push_back(status.ok() ? "work" : "failed work");
    end->hold(late.future());
  });
  end->end(nullptr);
  EXPECT_EQ(order, std::vector<std::string>{"work"});
  EXPECT_THROW(end->after_work([](const PassStatus&) {}), Error);
  late.set_value();
  EXPECT_EQ(order, (std::vector<std::string>{"work", "end"}));
}

TEST(PassEnd, FailsWithAnObserverOfTheWork) {
  auto end = std::make_shared<PassEnd>(1);
  bool later_one_failed = false;
  end->after_work([](const PassStatus&) { throw std::logic_error("incomplete"); });
  end->after_work([&](const PassStatus& status) { later_one_failed = !status.ok(); });
  end->end(nullptr);
  EXPECT_TRUE(later_one_failed);
  EXPECT_THROW(end->wait(), std::logic_error);
}

TEST(PassEnd, LetsDecisionsWaitForHeldFuturesAndHoldTheEnd) {
  auto end = std::make_shared<PassEnd>(1);
  Promise<void> late({}), vote({}), second_vote({});
  std::vector<std::string> order;
  end->after([&](const PassStatus&) { order.push_back("end"); });
  end->before_end([&](const PassStatus& status) {
    order.push_back(status.ok() ? "decision" : "refusal");
    end->hold(vote.future());
    end->before_end([&](const PassStatus&) {
      order.push_back("another");
      end->hold(second_vote.future());
    });
  });
  end->after_work([&](const PassStatus&) { order.push_back("work"); });
  end->hold(late.future());
  end->end(nullptr);
  EXPECT_EQ(order, std::vector<std::string>{"work"});
  late.set_value();
  EXPECT_EQ(order, (std::vector<std::string>{"work", "decision"}));
  vote.set_value();
  EXPECT_EQ(order.back(), "another");
  EXPECT_FALSE(end->has_arrived());
  second_vote.set_value();
  EXPECT_EQ(order.back(), "end");
  EXPECT_THROW(end->before_end([](const PassStatus&) {}), Error);
}

TEST(PassEnd, PassesFailuresToDecisionsAndFailsWithTheirs) {
  auto of_hold = std::make_shared<PassEnd>(1), of_decision = std::make_shared<PassEnd>(2);
  bool heard = false, was_notified = false;
  of_hold->hold(make_failed_future<void>(std::make_exception_ptr(std::logic_error("far away"))));
  of_hold->before_end([&](const PassStatus& status) { heard = !status.ok(); });
  of_hold->end(nullptr);
  EXPECT_TRUE(heard);
  EXPECT_THROW(of_hold->wait(), std::logic_error);
  of_decision->before_end([](const PassStatus&) { throw std::runtime_error("no"); });
  of_decision->after([&](const PassStatus& status) { was_notified = !status.ok(); });
  of_decision->end(nullptr);
  EXPECT_TRUE(was_notified);
  EXPECT_THROW(of_decision->wait(), std::runtime_error);
}

TEST(GradFieldSink, UnderOurPassFillsGradAsTheStockEngineDoes) {
  const auto mine = as_leaves({at::randn({3, 3})}), theirs = as_leaves({mine[0]});
  for (int pass = 0; pass < 2; ++pass) {
    GradFieldSink sink(1);
    backward({mine[0].matmul(mine[0]).sum()}, {}, sink);
    theirs[0].matmul(theirs[0]).sum().backward();
    expect_identical(mine[0].grad(), theirs[0].grad());
  }
}

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 1)
struct CountingAccumulateHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingAccumulateHook(int& calls) : calls(calls) {}
  void operator()(const Tensor&) override { ++calls; }
  int& calls;
};

/// The first leaf gets a gradient, the second gets none, and the third no longer requires one.
TEST(GradFieldSink, RunsPostAccumulateHooksOfTheLeavesForWhichLibTorchRunsThem) {
  const auto calls = [](bool ours) {
    const auto leaves = as_leaves({at::randn({3}), at::randn({3}), at::randn({3})});
    std::vector<int> counts(3);
    for (std::size_t i = 0; i < 3; ++i) {
      torch::autograd::impl::set_post_acc_grad_hooks(leaves[i],
                                                     std::make_unique<CountingAccumulateHook>(counts[i]));
    }
    const Tensor loss = (Forgetter::apply(leaves[0], leaves[1]) * leaves[2]).sum();
    leaves[2].set_requires_grad(false);
    GradFieldSink sink(1);
    ours ? backward({loss}, {}, sink) : loss.backward();
    return counts;
  };
  EXPECT_EQ(calls(true), calls(false));
  const int others = compat::kPostAccumulateHooksAlwaysRun ? 1 : 0;
  EXPECT_EQ(calls(true), (std::vector<int>{1, others, others}));
}
#endif

/// Halves every gradient that is ready, as an averaging reducer would, and remembers its passes.
struct Halver : GradientHook {
  struct Log {
    std::vector<std::uint64_t> passes;
    std::vector<bool> ok;
    std::function<Future<void>()> hold;
  };
  Halver(Tensor parameter, std::shared_ptr<NativeEnginePasses> passes, Log& log)
      : GradientHook(std::move(parameter), std::move(passes)), log(log) {}
  void gradient_ready(GradientSink& sink, const Tensor& parameter) override {
    const Tensor gradient = sink.gradient(parameter);
    if (gradient.defined()) sink.replace(parameter, gradient / 2);
    if (log.passes.empty() || log.passes.back() != sink.pass()) {
      log.passes.push_back(sink.pass());
      sink.after_pass([this](const PassStatus& status) { log.ok.push_back(status.ok()); });
      if (log.hold) sink.hold(log.hold());
    }
  }
  Log& log;
};

struct Hooked {
  Hooked() {
    for (const Tensor& parameter : parameters) {
      nodes.push_back(grad_accumulator(parameter));
      nodes.back()->add_post_hook(std::make_unique<Halver>(parameter, passes, log));
    }
  }
  Tensor loss() const { return (parameters[0] * 4 + parameters[1] * 6).sum(); }
  std::vector<Tensor> parameters = as_leaves({at::ones({2}), at::ones({2})});
  std::shared_ptr<NativeEnginePasses> passes = std::make_shared<NativeEnginePasses>();
  Halver::Log log;
  std::vector<NodePtr> nodes;
};

TEST(GradientHook, WorksOnGradUnderTheStockEngine) {
  Hooked hooked;
  hooked.loss().backward();
  EXPECT_TRUE(at::equal(hooked.parameters[0].grad(), at::full({2}, 2.0)));
  EXPECT_TRUE(at::equal(hooked.parameters[1].grad(), at::full({2}, 3.0)));
  EXPECT_EQ(hooked.log.passes.size(), 1U) << "one pass, one sink";
  hooked.loss().backward();
  EXPECT_EQ(hooked.log.passes, (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(hooked.log.ok, (std::vector<bool>{true, true}));
}

TEST(GradientHook, WorksOnTheMapUnderOurPass) {
  Hooked hooked;
  GradientMap gradients;
  MapSink sink(gradients, 77);
  backward({hooked.loss()}, {}, sink);
  EXPECT_TRUE(at::equal(gradients.gradient(hooked.parameters[0]), at::full({2}, 2.0)));
  EXPECT_TRUE(at::equal(gradients.gradient(hooked.parameters[1]), at::full({2}, 3.0)));
  EXPECT_FALSE(hooked.parameters[0].grad().defined());
  EXPECT_EQ(hooked.log.passes, (std::vector<std::uint64_t>{77}));
  EXPECT_EQ(hooked.log.ok, (std::vector<bool>{true}));
}

TEST(GradientHook, HoldsTheStockBackwardUntilItsFutureCompletes) {
  const auto executor = make_executor();
  auto pool = std::make_shared<Pool>(*executor, PoolOptions{.threads = 2});
  Hooked hooked;
  Promise<void> reduced(pool);
  std::atomic<bool> set{false};
  Thread completer;
  hooked.log.hold = [&] {
    completer = executor->spawn("all-reduce", [&] {
      set = true;
      reduced.set_value();
    });
    return reduced.future();
  };
  hooked.loss().backward();
  EXPECT_TRUE(set);
  EXPECT_EQ(hooked.log.ok, (std::vector<bool>{true}));
  completer.join();
  pool->stop();
}

TEST(GradientHook, IsNotifiedWhenTheStockEngineAbandonsThePass) {
  Hooked hooked;
  const Tensor broken = hooked.parameters[1] * 6;
  const Tensor fine = hooked.parameters[0] * 4;
  int calls = 0;
  broken.register_hook([&](const Tensor&) {
    if (++calls == 1) throw std::runtime_error("the backward was interrupted");
  });
  EXPECT_THROW((fine + broken).sum().backward(), std::runtime_error);
  EXPECT_EQ(hooked.log.ok, (std::vector<bool>{false}));
  hooked.loss().backward();
  EXPECT_EQ(hooked.log.ok, (std::vector<bool>{false, true}));
}

struct Arrivals : PassHook {
  Arrivals(std::shared_ptr<NativeEnginePasses> passes, std::vector<std::uint64_t>& seen)
      : PassHook(std::move(passes)), seen(seen) {}
  void pass_arrives(GradientSink& sink) override { seen.push_back(sink.pass()); }
  std::vector<std::uint64_t>& seen;
};

TEST(PassHook, IsNotifiedOfThePassUnderEitherEngine) {
  const Tensor x = as_leaves({at::ones({2})})[0];
  const auto passes = std::make_shared<NativeEnginePasses>();
  std::vector<std::uint64_t> seen;
  Tensor y = x * 3;
  y.grad_fn()->add_pre_hook(std::make_unique<Arrivals>(passes, seen));
  y.sum().backward({}, /*retain_graph=*/true);
  GradientMap gradients;
  MapSink sink(gradients, 77);
  backward({y.sum()}, {}, sink);
  EXPECT_EQ(seen, (std::vector<std::uint64_t>{1, 77}));
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 3.0)));
}

TEST(NativeEnginePasses, HaveNoCurrentPassOutsideThem) {
  EXPECT_THROW(std::make_shared<NativeEnginePasses>()->current(), Error);
}

/// Each end waits for the other's work: ranks may reach the ends of two owners in different orders.
TEST(NativeEnginePasses, OfTwoOwnersFinishTheirWorkBeforeTheEndOfEitherIsAwaited) {
  Hooked one, other;
  Promise<void> needed({});
  one.log.hold = [&] { return needed.future(); };
  other.nodes[0]->add_post_hook(std::make_unique<Halver>(other.parameters[0], other.passes, other.log));
  other.log.hold = [&] {
    other.passes->current()->after_work([&](const PassStatus&) { needed.set_value(); });
    return make_ready_future<void>();
  };
  (one.loss() + other.loss()).backward();
  EXPECT_EQ(one.log.ok, std::vector<bool>{true});
  EXPECT_EQ(other.log.ok, std::vector<bool>{true});
}

TEST(NativeEnginePasses, ThatAreUnitedGiveOneSink) {
  Hooked one, other, third;
  one.passes->unite(other.passes);
  third.passes->unite(one.passes);
  other.passes->unite(third.passes);
  (third.loss() + other.loss() + one.loss()).backward();
  EXPECT_EQ(one.log.passes, other.log.passes);
  EXPECT_EQ(one.log.passes, third.log.passes);
  EXPECT_EQ(one.log.passes.size(), 1U);
}

}  // namespace
}  // namespace torchspan::engine::sink_test
