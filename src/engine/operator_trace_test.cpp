#include <algorithm>
#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/engine/operator_trace.h>

#include "core/api/span_kinds.h"
#include "engine/oracle.h"

namespace torchspan::engine::operator_trace_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsSupersetOf;
using ::testing::Not;

/// A traced worker's spans.
struct TracedRun {
  TracedRun() { spans.set_traced(65536); }
  std::vector<SpanRecord> of(SpanKind kind) const {
    std::vector<SpanRecord> found;
    for (const SpanRecord& span : spans.snapshot()) {
      if (span.kind == kind) found.push_back(span);
    }
    return found;
  }
  std::vector<std::string> names_of(SpanKind kind) const {
    std::vector<std::string> names;
    for (const SpanRecord& span : of(kind)) names.push_back(span.name);
    return names;
  }
  /// The modules that are used one after another; C++ modules may use a parameter with several operators.
  std::vector<std::string> modules() const {
    std::vector<std::string> names = names_of(kModuleSpan);
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
  }
  const std::unique_ptr<Executor> executor = make_executor();
  SpanRecorder spans{*executor};
};

/// For each module span, the nodes of a backward pass that the span's operator created.
std::map<std::string, std::set<std::string>> nodes_by_module(const TracedRun& run) {
  std::map<std::string, std::set<std::string>> nodes;
  for (const SpanRecord& module : run.of(kModuleSpan)) {
    for (const SpanRecord& node : run.of(kOperatorSpan)) {
      if (node.link.part == module.link.part && node.id >= module.id &&
          node.id < module.id + module.link.bytes) {
        nodes[module.name].insert(node.name);
      }
    }
  }
  return nodes;
}

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
}

TEST(OperatorTrace, RecordsModulesOperatorsAndNodesOfABackward) {
  TracedRun run;
  auto net = make_net();
  OperatorTrace trace(run.spans);
  trace.add("net", *net);
  net->forward(torch::randn({3, 4})).sum().backward();
  EXPECT_THAT(run.modules(), ElementsAre("net.0", "net.2"));
  EXPECT_THAT(run.names_of(kOperatorSpan),
              IsSupersetOf({"aten::addmm", "aten::relu", "AddmmBackward0", "ReluBackward0"}));
  const auto nodes = nodes_by_module(run);
  EXPECT_THAT(nodes.at("net.0"), Contains("AddmmBackward0"));
  EXPECT_THAT(nodes.at("net.2"), Contains("AddmmBackward0"));
  EXPECT_THAT(nodes.at("net.2"), Not(Contains("ReluBackward0")));
  EXPECT_EQ(run.of(kModuleSpan)[0].link.peer, 0) << "the weight is the module's first parameter";
  for (const SpanRecord& module : run.of(kModuleSpan)) {
    bool inside = false;
    for (const SpanRecord& span : run.of(kOperatorSpan)) {
      inside = inside || (span.begin == module.begin && span.end <= module.end);
    }
    EXPECT_TRUE(inside) << module.name;
  }
}

TEST(OperatorTrace, RecordsTheNodesThatTheEngineOfThisLibraryRuns) {
  TracedRun run;
  auto net = make_net();
  OperatorTrace trace(run.spans);
  trace.add("net", *net);
  GradientMap gradients;
  MapSink sink(gradients);
  backward({net->forward(torch::randn({3, 4})).sum()}, {}, sink);
  const auto nodes = nodes_by_module(run);
  EXPECT_THAT(nodes.at("net.0"), Contains("AddmmBackward0"));
  EXPECT_THAT(nodes.at("net.2"), Contains("AddmmBackward0"));
}

TEST(OperatorTrace, FollowsViewsOfParameters) {
  TracedRun run;
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 2).bias(false));
  OperatorTrace trace(run.spans);
  trace.add("linear", *linear);
  linear->forward(torch::randn({3, 4})).sum().backward();
  EXPECT_THAT(nodes_by_module(run).at("linear"), Contains("MmBackward0"));
}

TEST(OperatorTrace, FindsParametersInLists) {
  TracedRun run;
  torch::nn::LSTM net(torch::nn::LSTMOptions(3, 5));
  OperatorTrace trace(run.spans);
  trace.add("", *net);
  std::get<0>(net->forward(torch::randn({2, 1, 3}))).sum().backward();
  EXPECT_THAT(run.names_of(kModuleSpan), ElementsAre("model"));
}

TEST(OperatorTrace, LeavesOutParametersThatAreUsedWithoutGradients) {
  TracedRun run;
  auto net = make_net();
  OperatorTrace trace(run.spans);
  trace.add("net", *net);
  torch::optim::AdamW optimizer(net->parameters(), 0.1);
  net->forward(torch::randn({3, 4})).sum().backward();
  const std::size_t before = run.of(kModuleSpan).size();
  optimizer.step();
  optimizer.zero_grad();
  {
    const torch::NoGradGuard off;
    net->forward(torch::randn({3, 4}));
  }
  EXPECT_EQ(run.of(kModuleSpan).size(), before);
}

TEST(OperatorTrace, RecordsOperatorsThatThrow) {
  TracedRun run;
  torch::nn::Linear linear(4, 2);
  OperatorTrace trace(run.spans);
  trace.add("linear", *linear);
  EXPECT_ANY_THROW(linear->forward(torch::randn({3, 5})));
  const std::size_t thrown = run.of(kModuleSpan).size();
  EXPECT_GT(thrown, 0u);
  linear->forward(torch::randn({3, 4}));
  EXPECT_GT(run.of(kModuleSpan).size(), thrown);
  EXPECT_THAT(run.modules(), ElementsAre("linear"));
}

TEST(OperatorTrace, WithoutOperatorsRecordsModulesAndNodesOnly) {
  TracedRun run;
  auto net = make_net();
  OperatorTrace trace(run.spans, {.operators = false});
  trace.add("net", *net);
  net->forward(torch::randn({3, 4})).sum().backward();
  EXPECT_THAT(run.modules(), ElementsAre("net.0", "net.2"));
  for (const SpanRecord& span : run.of(kOperatorSpan)) EXPECT_GT(span.link.part, 0) << span.name;
  EXPECT_THAT(nodes_by_module(run).at("net.0"), Contains("AddmmBackward0"));
}

TEST(OperatorTrace, DoesNothingInARunThatIsNotTraced) {
  const auto executor = make_executor();
  SpanRecorder spans(*executor);
  auto net = make_net();
  OperatorTrace trace(spans);
  trace.add("net", *net);
  net->forward(torch::randn({3, 4})).sum().backward();
  EXPECT_EQ(spans.recorded(), 0u);
  EXPECT_FALSE(at::hasGlobalCallbacks());
}

TEST(OperatorTrace, TwoWorkersOfAProcessSeeTheirOwnModules) {
  TracedRun first, second;
  auto net = make_net(), other = make_net();
  OperatorTrace one(first.spans);
  auto two = std::make_unique<OperatorTrace>(second.spans);
  one.add("net", *net);
  two->add("other", *other);
  other->forward(net->forward(torch::randn({3, 4})).repeat({1, 2}));
  EXPECT_THAT(first.modules(), ElementsAre("net.0", "net.2"));
  EXPECT_THAT(second.modules(), ElementsAre("other.0", "other.2"));
  const std::size_t uses = first.of(kModuleSpan).size();
  two.reset();
  const std::uint64_t recorded = second.spans.recorded();
  net->forward(torch::randn({3, 4}));
  EXPECT_EQ(second.spans.recorded(), recorded);
  EXPECT_EQ(first.of(kModuleSpan).size(), 2 * uses);
}

TEST(OperatorTrace, EndsWhileOtherThreadsRunOperators) {
  const auto executor = make_executor();
  auto net = make_net();
  std::atomic<bool> stop{false};
  std::atomic<int> steps{0};
  {
    std::vector<Thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.push_back(executor->spawn("operators", [&] {
        while (!stop.load()) {
          net->forward(torch::randn({3, 4}));
          ++steps;
        }
      }));
    }
    for (int i = 0; i < 40; ++i) {
      TracedRun run;
      OperatorTrace trace(run.spans);
      trace.add("net", *net);
      const int begun = steps.load();
      while (steps.load() < begun + 3) executor->yield();
      EXPECT_GT(run.spans.recorded(), 0u);
    }
    stop.store(true);
    for (Thread& thread : threads) thread.join();
  }
  EXPECT_FALSE(at::hasGlobalCallbacks());
}

}  // namespace
}  // namespace torchspan::engine::operator_trace_test
