#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>

#include "engine/oracle.h"
#include "engine/test_nodes.h"

namespace torchspan::engine::graph_pass_test {
namespace {

using namespace testing;

Tensor leaf() { return at::ones({2}).requires_grad_(); }

TEST(GraphPass, WaitsForPendingRootsAndFinishesWithTheLast) {
  const Tensor x = leaf();
  auto first = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  auto second = make_node<Outgoing>(std::vector<Tensor>{x * 3});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_root((x * 5).sum());
  pass.add_pending(first);
  pass.add_pending(second);
  pass.prepare();
  pass.run();
  EXPECT_FALSE(pass.finished());
  EXPECT_FALSE(sink.end()->has_arrived());
  EXPECT_TRUE(pass.deliver(*second, {at::ones({2})}));
  pass.run();
  EXPECT_FALSE(pass.finished());
  EXPECT_FALSE(gradients.gradient(x).defined()) << "the leaf still waits for the other root";
  EXPECT_TRUE(pass.deliver(*first, {at::ones({2})}));
  pass.run();
  EXPECT_TRUE(pass.finished());
  EXPECT_TRUE(sink.end()->has_arrived());
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 10.0)));
}

TEST(GraphPass, TakesDeliveriesBeforeItIsPrepared) {
  const Tensor x = leaf();
  auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_pending(send);
  EXPECT_TRUE(pass.deliver(*send, {at::ones({2})}));
  pass.run();
  EXPECT_FALSE(pass.finished()) << "nothing is counted yet";
  pass.prepare();
  pass.run();
  EXPECT_TRUE(pass.finished());
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 2.0)));
}

TEST(GraphPass, RefusesUnknownRootsAndIgnoresRepeatedOnes) {
  const Tensor x = leaf();
  auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  auto unrelated = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_pending(send);
  pass.prepare();
  EXPECT_THROW(pass.deliver(*unrelated, {at::ones({2})}), Error);
  EXPECT_TRUE(pass.deliver(*send, {at::ones({2})}));
  EXPECT_FALSE(pass.deliver(*send, {at::ones({2})}));
  pass.run();
  EXPECT_TRUE(pass.finished());
  EXPECT_FALSE(pass.deliver(*send, {at::ones({2})}));
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 2.0)));
  EXPECT_THROW(pass.add_pending(unrelated), Error);
}

TEST(GraphPass, FailsWhenTheNumberOfGradientsIsWrong) {
  const Tensor x = leaf();
  auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_pending(send);
  pass.prepare();
  pass.deliver(*send, {at::ones({2}), at::ones({2})});
  pass.run();
  EXPECT_TRUE(pass.failed());
  EXPECT_NE(pass.failed_node().find("Outgoing"), std::string::npos);
}

TEST(GraphPass, SkipsWhatOnlyRootsWithoutReachedOutputsReach) {
  const Tensor x = leaf(), y = leaf(), z = leaf();
  const Tensor shared = x * 2;
  auto kept = make_node<Outgoing>(std::vector<Tensor>{shared * y});
  auto dropped = make_node<Outgoing>(std::vector<Tensor>{shared.exp() * z});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_pending(kept);
  pass.add_pending(dropped);
  pass.prepare();
  pass.deliver(*kept, {at::ones({2})});
  EXPECT_TRUE(pass.deliver(*dropped, Delivery{{Tensor()}, {false}}));
  pass.run();
  EXPECT_TRUE(pass.finished());
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 2.0)));
  EXPECT_TRUE(gradients.gradient(y).defined());
  EXPECT_FALSE(gradients.gradient(z).defined());
  const PassReport report = pass.report();
  EXPECT_EQ(report.nodes, report.executed + report.skipped);
  EXPECT_EQ(report.skipped, 3U);  // the product, exp, and the leaf z
}

TEST(GraphPass, SkipsWhatLiesBehindOutputsThatAreNotReached) {
  const Tensor x = leaf(), y = leaf();
  auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2, Recomputed::apply(y.view({1, 2}), at::eye(2))});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  pass.add_pending(send);
  pass.prepare();
  pass.deliver(*send, Delivery{{at::ones({2}), Tensor()}, {true, false}});
  pass.run();
  ASSERT_TRUE(pass.finished());
  EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({2}, 2.0)));
  EXPECT_FALSE(gradients.gradient(y).defined()) << "not even a gradient of zeros";
}

/// A prepared pass with two pending roots.
struct PassOfTwoSends {
  PassOfTwoSends() {
    pass.add_pending(arrived);
    pass.add_pending(missing);
    pass.prepare();
  }
  const Tensor x = leaf(), y = leaf();
  const NodePtrTo<Outgoing> arrived = make_node<Outgoing>(std::vector<Tensor>{x.sin()}),
                            missing = make_node<Outgoing>(std::vector<Tensor>{y.exp()});
  GradientMap gradients;
  MapSink sink{gradients};
  GraphPass pass{sink};
};

TEST(GraphPass, ReportsPendingRootsWithoutGradients) {
  PassOfTwoSends two;
  two.pass.deliver(*two.arrived, {at::ones({2})});
  two.pass.run();
  const PassReport report = two.pass.report();
  EXPECT_EQ(report.nodes, 6U);
  EXPECT_EQ(report.executed, 3U);
  EXPECT_EQ(report.waiting_for, (std::vector<torch::autograd::Node*>{two.missing.get()}));
  EXPECT_FALSE(report.busy);
}

/// Else a survey that finds a thread between the two calls would report a stalled pass.
TEST(GraphPass, IsBusyFromADeliveryUntilItHasRun) {
  PassOfTwoSends two;
  two.pass.run();
  EXPECT_FALSE(two.pass.report().busy);
  two.pass.deliver(*two.arrived, {at::ones({2})});
  EXPECT_TRUE(two.pass.report().busy);
  two.pass.run();
  EXPECT_FALSE(two.pass.report().busy);
}

TEST(GraphPass, ThatIsAbortedEndsItsSinkAndFreesItsGraph) {
  Tensor x = leaf();
  auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2});
  const WeakNodePtr watched(send);
  GradientMap gradients;
  MapSink sink(gradients, 42);
  PassStatus status;
  sink.after_pass([&](const PassStatus& end) { status = end; });
  GraphPass pass(sink);
  pass.add_pending(send);
  pass.prepare();
  pass.run();
  EXPECT_TRUE(pass.abort(Error(ErrorKind::kDisconnected, "worker2 died")));
  EXPECT_FALSE(pass.abort(Error(ErrorKind::kCancelled, "again")));
  EXPECT_TRUE(pass.failed());
  EXPECT_EQ(status.pass, 42U);
  EXPECT_EQ(to_error(status.error).kind(), ErrorKind::kDisconnected);
  EXPECT_EQ(to_error(pass.error()).message(), "worker2 died");
  EXPECT_FALSE(pass.deliver(*send, {at::ones({2})}));
  send.reset();
  EXPECT_TRUE(watched.expired());
}

TEST(GraphPass, AbortedByOneOfItsNodesRunsNoOther) {
  const Tensor x = leaf();
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  int later = 0;
  Tensor y = x * 2;
  y.register_hook([&](const Tensor&) { ++later; });
  Tensor z = y.exp();
  z.register_hook([&](const Tensor&) { pass.abort(Error(ErrorKind::kCancelled, "enough")); });
  pass.add_root(z.sum());
  pass.prepare();
  pass.run();
  EXPECT_TRUE(pass.failed());
  EXPECT_EQ(later, 0);
}

TEST(GraphPass, AbortedBeforeItIsPreparedFailsThere) {
  const Tensor x = leaf();
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  EXPECT_TRUE(pass.abort(Error(ErrorKind::kCancelled, "never mind")));
  pass.add_root((x * 2).sum());
  pass.prepare();
  EXPECT_TRUE(pass.failed());
  pass.run();
  EXPECT_EQ(gradients.size(), 0U);
}

TEST(GraphPass, ThatIsDroppedEndsItsSinkAsCancelled) {
  const Tensor x = leaf();
  for (bool prepared : {true, false}) {
    auto send = make_node<Outgoing>(std::vector<Tensor>{x * 2});
    GradientMap gradients;
    MapSink sink(gradients);
    {
      GraphPass pass(sink);
      pass.add_pending(send);
      if (prepared) pass.prepare();
    }
    ASSERT_TRUE(sink.end()->has_arrived());
    try {
      sink.end()->wait();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    }
  }
}

TEST(GraphPass, NeedsAFreshSink) {
  GradientMap gradients;
  MapSink sink(gradients);
  backward({leaf().sum()}, {}, sink);
  EXPECT_THROW(GraphPass pass(sink), Error);
}

TEST(GraphPass, MayBeDestroyedByTheCallbackOfItsEnd) {
  const Tensor x = leaf();
  GradientMap gradients;
  MapSink sink(gradients);
  auto pass = std::make_unique<GraphPass>(sink);
  sink.after_pass([&](const PassStatus&) { pass.reset(); });
  pass->add_root(x.sum());
  pass->prepare();
  pass->run();
  EXPECT_EQ(pass, nullptr);
  EXPECT_TRUE(gradients.gradient(x).defined());
}

TEST(GraphPass, DeliveredAndRunFromInsideItsOwnNodesGoesOnInTheDriver) {
  const Tensor x = leaf();
  const Tensor sent = x.exp();
  auto send = make_node<Outgoing>(std::vector<Tensor>{sent});
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  int depth = 0, deepest = 0;
  auto receive = make_node<Incoming>([&](torch::autograd::variable_list arrived) {
    deepest = std::max(deepest, ++depth);
    pass.deliver(*send, std::move(arrived));
    pass.run();
    --depth;
  });
  pass.add_root((received(sent, receive) * 3).sum());
  pass.add_pending(send);
  pass.prepare();
  pass.run();
  ASSERT_TRUE(pass.finished());
  EXPECT_EQ(deepest, 1);
  EXPECT_TRUE(at::allclose(gradients.gradient(x), x.detach().exp() * 3));
}

TEST(GraphPass, TakesRootsFromManyThreads) {
  const auto executor = make_executor();
  for (std::uint64_t round = 0; round < 50; ++round) {
    const Tensor x = at::ones({4}).requires_grad_();
    const Tensor shared = x * 2;
    std::vector<NodePtrTo<Outgoing>> sends;
    for (int i = 0; i < 8; ++i) sends.push_back(make_node<Outgoing>(std::vector<Tensor>{shared * (i + 1)}));
    GradientMap gradients;
    MapSink sink(gradients, round);
    std::atomic<int> ends{0};
    sink.after_pass([&](const PassStatus& status) { ends += status.ok(); });
    GraphPass pass(sink);
    for (const auto& send : sends) pass.add_pending(send);
    pass.prepare();
    {
      std::vector<Thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.push_back(executor->spawn("deliver", [&, t] {
          for (int i = t; i < 8; i += 4) {
            pass.deliver(*sends[i], {at::ones({4})});
            pass.run();
          }
        }));
      }
    }
    ASSERT_TRUE(pass.finished()) << "round " << round;
    EXPECT_EQ(ends, 1);
    EXPECT_TRUE(at::equal(gradients.gradient(x), at::full({4}, 72.0)));
  }
}

/// Two threads act on each of `rounds` small passes at the same moment: one delivers its root, the other
/// delivers too or aborts. Returns how many passes did not end.
int race(int rounds, bool abort) {
  struct Round {
    Round() : sink(gradients), pass(sink) {
      for (const auto& send : sends) pass.add_pending(send);
      pass.prepare();
    }
    const Tensor x = leaf();
    std::vector<NodePtrTo<Outgoing>> sends{make_node<Outgoing>(std::vector<Tensor>{x}),
                                           make_node<Outgoing>(std::vector<Tensor>{x})};
    GradientMap gradients;
    MapSink sink;
    GraphPass pass;
  };
  std::vector<std::unique_ptr<Round>> all;
  for (int i = 0; i < rounds; ++i) all.push_back(std::make_unique<Round>());
  const auto executor = make_executor();
  std::atomic<int> arrived{0};
  {
    std::vector<Thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.push_back(executor->spawn("race", [&, t] {
        const Tensor gradient = at::ones({2});
        for (int i = 0; i < rounds; ++i) {
          ++arrived;
          for (int spins = 0; arrived < 2 * (i + 1); ++spins) {
            if (spins > 1000) executor->yield();
          }
          GraphPass& pass = all[i]->pass;
          if (abort && t == 1) {
            pass.abort(Error(ErrorKind::kCancelled, "stop"));
          } else {
            pass.deliver(*all[i]->sends[t], {gradient});
            pass.run();
          }
        }
      }));
    }
  }
  int open = 0;
  for (const auto& round : all) open += !(abort ? round->pass.failed() : round->pass.finished());
  return open;
}

TEST(GraphPass, LosesNoRootThatArrivesWhileTheDriverIsLeaving) { EXPECT_EQ(race(4000, /*abort=*/false), 0); }

TEST(GraphPass, LosesNoAbortThatArrivesWhileTheDriverIsLeaving) { EXPECT_EQ(race(4000, /*abort=*/true), 0); }

TEST(GraphPass, AbortedWhileManyThreadsDeliverEndsOnce) {
  const auto executor = make_executor();
  for (std::uint64_t round = 0; round < 50; ++round) {
    const Tensor x = leaf();
    std::vector<NodePtrTo<Outgoing>> sends;
    for (int i = 0; i < 8; ++i) sends.push_back(make_node<Outgoing>(std::vector<Tensor>{x * i}));
    GradientMap gradients;
    MapSink sink(gradients, round);
    std::atomic<int> ends{0};
    sink.after_pass([&](const PassStatus&) { ++ends; });
    GraphPass pass(sink);
    for (const auto& send : sends) pass.add_pending(send);
    pass.prepare();
    {
      std::vector<Thread> threads;
      for (int t = 0; t < 2; ++t) {
        threads.push_back(executor->spawn("deliver", [&, t] {
          for (int i = t; i < 7; i += 2) {
            pass.deliver(*sends[i], {at::ones({2})});
            pass.run();
          }
        }));
      }
      threads.push_back(executor->spawn("abort", [&] { pass.abort(Error(ErrorKind::kCancelled, "stop")); }));
    }
    EXPECT_TRUE(pass.failed());
    EXPECT_EQ(ends, 1);
  }
}

}  // namespace
}  // namespace torchspan::engine::graph_pass_test
