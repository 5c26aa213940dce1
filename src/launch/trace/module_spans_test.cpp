#include "launch/trace/module_spans.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <tuple>

#include "core/api/span_kinds.h"
#include "launch/trace/example_traces.h"

namespace torchspan::launch::module_spans_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

using Shown = std::tuple<std::string, std::int64_t, std::int64_t>;

/// The trace of a program that runs modules; its clock advances with each operator.
class ModuleProgram {
 public:
  /// An operator that uses a parameter and creates `nodes` autograd nodes. Returns its beginning.
  std::int64_t use(const std::string& module, int parameter = 0, std::uint64_t nodes = 2) {
    trace_.span(kModuleSpan, module, now_, now_ + 10,
                {.id = next_node_, .peer = parameter, .part = 1, .bytes = nodes});
    next_node_ += nodes;
    return advance();
  }
  /// An operator without parameters; returns its node.
  std::uint64_t other() {
    advance();
    return next_node_++;
  }
  std::int64_t node(std::uint64_t number, std::uint32_t thread = 0) {
    trace_.span(kOperatorSpan, "node", now_, now_ + 10, {.id = number, .part = 1});
    trace_.contents().spans.back().thread = thread;
    return advance();
  }
  std::uint64_t next_node() const { return next_node_; }
  std::int64_t now() const { return now_; }

  std::vector<Shown> shown() {
    TraceContents trace = trace_.contents();
    make_module_spans(trace);
    std::vector<Shown> found;
    for (const StoredSpan& span : trace.spans) {
      EXPECT_TRUE(span.nested);
      if (span.kind == kModuleSpan) found.emplace_back(trace.names[span.name], span.begin, span.end);
    }
    std::ranges::sort(found, {}, [](const Shown& one) {
      return std::tuple(std::get<1>(one), -std::get<2>(one), std::get<0>(one));
    });
    return found;
  }
  TraceContents& contents() { return trace_.contents(); }

 private:
  std::int64_t advance() {
    now_ += 100;
    return now_ - 100;
  }

  ExampleTrace trace_{0, 1};
  std::int64_t now_ = 1000;
  std::uint64_t next_node_ = 5;
};

TEST(ModuleSpans, EnclosesModulesInsideOthers) {
  ModuleProgram program;
  program.use("net.encoder.0");
  const std::uint64_t relu = program.other();
  program.use("net.encoder.1");
  program.use("net.head");
  for (std::uint64_t node = program.next_node(); node-- > 5;) program.node(node);
  ASSERT_EQ(relu, 7u);  // nodes 5 and 6: encoder.0, 8 and 9: encoder.1, 10 and 11: head
  EXPECT_THAT(
      program.shown(),
      ElementsAre(Shown("forward net", 1000, 1310), Shown("forward net.encoder", 1000, 1210),
                  Shown("forward net.encoder.0", 1000, 1010), Shown("forward net.encoder.1", 1200, 1210),
                  Shown("forward net.head", 1300, 1310), Shown("backward net", 1400, 2010),
                  Shown("backward net.head", 1400, 1510), Shown("backward net.encoder", 1600, 2010),
                  Shown("backward net.encoder.1", 1600, 1710), Shown("backward net.encoder.0", 1900, 2010)));
}

TEST(ModuleSpans, BeginsANewCallWhenTheFirstParameterIsUsedAgain) {
  ModuleProgram program;
  for (int call = 0; call < 2; ++call) {
    program.use("net.a", 0);
    program.use("net.a", 1);
    program.use("net.b");
  }
  program.use("net.b");
  EXPECT_THAT(program.shown(),
              ElementsAre(Shown("forward net", 1000, 1210), Shown("forward net.a", 1000, 1110),
                          Shown("forward net.b", 1200, 1210), Shown("forward net", 1300, 1610),
                          Shown("forward net.a", 1300, 1410), Shown("forward net.b", 1500, 1510),
                          Shown("forward net.b", 1600, 1610)));
}

TEST(ModuleSpans, BeginsANewCallAfterABackwardOnItsThread) {
  ModuleProgram program;
  program.use("net.a");
  program.use("net.b");
  program.node(7);
  program.use("net.b");  // without net.a, as if layers were left out at random
  EXPECT_THAT(program.shown(),
              ElementsAre(Shown("forward net", 1000, 1110), Shown("forward net.a", 1000, 1010),
                          Shown("forward net.b", 1100, 1110), Shown("backward net", 1200, 1210),
                          Shown("backward net.b", 1200, 1210), Shown("forward net", 1300, 1310),
                          Shown("forward net.b", 1300, 1310)));
}

TEST(ModuleSpans, ShowsBackwardsOnTheThreadThatRunsThem) {
  ModuleProgram program;
  program.use("a");
  program.use("b");
  program.node(8, 1);
  program.node(6, 1);
  make_module_spans(program.contents());
  std::vector<std::uint32_t> threads;
  for (const StoredSpan& span : program.contents().spans) {
    if (span.kind == kModuleSpan) threads.push_back(span.thread);
  }
  EXPECT_THAT(threads, ElementsAre(0, 0, 1, 1));
}

TEST(ModuleSpans, LeavesOutNodesOfNoModule) {
  ModuleProgram program;
  const std::uint64_t before = program.other();
  program.use("frozen", 0, 0);
  const std::uint64_t after = program.other();
  program.node(after);
  program.node(before);
  program.node(1'000'000);
  EXPECT_THAT(program.shown(), ElementsAre(Shown("forward frozen", 1100, 1110)));
  ExampleTrace none(0, 1);
  make_module_spans(none.contents());
  EXPECT_THAT(none.contents().spans, IsEmpty());
}

TEST(ModuleSpans, EncloseWhatTheEngineDoesForANode) {
  ExampleTrace trace(0, 1);
  trace.span(kModuleSpan, "a", 0, 10, {.id = 5, .peer = 0, .part = 1, .bytes = 2});
  trace.span(kOperatorSpan, "node", 110, 150, {.id = 6, .part = 1});
  trace.span(kOperatorSpan, "autograd::engine::evaluate_function: node", 100, 190);
  trace.span(kOperatorSpan, "node", 210, 250, {.id = 5, .part = 1});
  trace.span(kOperatorSpan, "autograd::engine::evaluate_function: node", 210, 290);
  trace.span(kOperatorSpan, "autograd::engine::evaluate_function: loss", 300, 310);
  make_module_spans(trace.contents());
  const StoredSpan& backward = trace.contents().spans.back();
  EXPECT_EQ(trace.contents().names[backward.name], "backward a");
  EXPECT_EQ(backward.begin, 100);
  EXPECT_EQ(backward.end, 290);
  EXPECT_EQ(trace.contents().spans.size(), 7u) << "two spans of the module, and what the engine ran";
}

/// A module whose operators and inner modules run in order, each once.
struct RandomModule {
  std::string name;
  bool has_parameter = false;
  std::vector<RandomModule> inner;
};

RandomModule random_module(const std::string& name, int depth, std::mt19937& random) {
  RandomModule module{name, depth == 0 || random() % 2 == 0, {}};
  const std::uint64_t count = depth == 0 ? 0 : random() % 3 + 1;
  for (std::uint64_t i = 0; i < count; ++i) {
    module.inner.push_back(random_module(name + "." + std::to_string(i), depth - 1, random));
  }
  return module;
}

struct RunModule {
  std::string name;
  std::uint64_t first = 0, last = 0;  ///< nodes
};

/// Runs a module and the modules inside it; collects their nodes and what must be shown.
std::int64_t run(const RandomModule& module, std::mt19937& random, ModuleProgram& program,
                 std::vector<RunModule>& ran, std::vector<Shown>& expected) {
  const std::size_t place = ran.size(), shown = expected.size();
  ran.push_back({module.name, program.next_node(), 0});
  const std::int64_t begin = program.now();
  expected.emplace_back("forward " + module.name, begin, 0);
  std::int64_t end = 0;
  if (module.has_parameter) end = program.use(module.name) + 10;
  ran[place].last = program.next_node();
  for (const RandomModule& inner : module.inner) {
    if (end != 0 && random() % 2 == 0) program.other();
    end = run(inner, random, program, ran, expected);
    ran[place].last = program.next_node();
  }
  std::get<2>(expected[shown]) = end;
  return end;
}

TEST(ModuleSpans, AreThoseOfRandomPrograms) {
  std::random_device seeds;
  for (int trial = 0; trial < 50; ++trial) {
    const auto seed = seeds();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const RandomModule net = random_module("net", 3, random);
    ModuleProgram program;
    std::vector<Shown> expected;
    for (int step = 0; step < 3; ++step) {
      std::vector<RunModule> ran;
      const std::uint64_t first = program.next_node();
      run(net, random, program, ran, expected);
      const std::uint64_t last = program.next_node();
      program.other();  // the loss
      const std::int64_t begun = program.now();
      for (std::uint64_t node = last; node-- > first;) program.node(node);
      const auto begin_of = [&](std::uint64_t node) {
        return begun + 100 * static_cast<std::int64_t>(last - 1 - node);
      };
      for (const RunModule& module : ran) {
        expected.emplace_back("backward " + module.name, begin_of(module.last - 1),
                              begin_of(module.first) + 10);
      }
    }
    EXPECT_THAT(program.shown(), UnorderedElementsAreArray(expected));
  }
}

}  // namespace
}  // namespace torchspan::launch::module_spans_test
