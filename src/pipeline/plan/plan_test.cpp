#include <algorithm>
#include <fmt/format.h>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/plan.h>

#include "tests/support/errors.h"

namespace torchspan::pipeline::plan_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Use = PlanRequest::Use;

/// One letter per use: the same letter is the same layer. Stage s belongs to "w<s>".
PlanRequest request_of(const std::string& letters, std::vector<int> balance) {
  PlanRequest request;
  for (const char letter : letters) {
    const std::string name(1, letter);
    auto found = std::find(request.layers.begin(), request.layers.end(), name);
    Use use;
    use.layer = static_cast<int>(found - request.layers.begin());
    request.uses.push_back(use);
    if (found == request.layers.end()) request.layers.push_back(name);
  }
  for (std::size_t stage = 0; stage < balance.size(); ++stage)
    request.workers.push_back("w" + std::to_string(stage));
  request.balance = std::move(balance);
  return request;
}

Plan plan_of(const std::string& letters, std::vector<int> balance) {
  return make_plan(request_of(letters, std::move(balance)));
}

/// The stage of each use, in order.
std::vector<int> stages(const Plan& plan) {
  std::vector<int> all;
  for (const Invocation& use : plan.invocations) all.push_back(use.here.stage);
  return all;
}

/// "stage:first-last" of each layer range.
std::vector<std::string> ranges(const Plan& plan) {
  std::vector<std::string> all;
  for (const LayerRange& range : plan.layer_ranges)
    all.push_back(fmt::format("{}:{}-{}", range.stage, range.first, range.last));
  return all;
}

/// The letters of the layers that a micro-batch passes, in order.
std::string way(const Plan& plan) {
  std::string letters;
  for (const LayerRange& range : plan.layer_ranges) {
    for (int order = range.first; order <= range.last; ++order) {
      letters +=
          plan.layers[static_cast<std::size_t>(plan.invocations[static_cast<std::size_t>(order)].layer)];
    }
  }
  return letters;
}

std::string error_of(const PlanRequest& request) {
  return torchspan::testing::invalid_text([&] { make_plan(request); });
}

// The three layouts of the peer's test_instantiate_partition.

// peer: async_pipe `instantiate_partition` (3 layouts): better: also ABAC, AAB and ABA, which the peer
//   silently plans wrongly
TEST(Plan, PutsLayersWithoutReuseOneAfterTheOther) {
  const Plan plan = plan_of("ABCD", {2, 2});
  EXPECT_THAT(plan.locations, ElementsAre(Location{0, 0}, Location{0, 1}, Location{1, 0}, Location{1, 1}));
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-1", "1:2-3"));
  ASSERT_EQ(plan.links.size(), 1u);
  EXPECT_EQ(plan.links[0].stashed_by, 1);
  EXPECT_EQ(plan.links[0].popped_by, 2);
  EXPECT_TRUE(plan.links[0].skip.empty());
}

// peer: async_pipe instantiate_partition
TEST(Plan, ReturnsToALayerOfAnEarlierStage) {
  const Plan plan = plan_of("ABCA", {2, 1});
  EXPECT_THAT(plan.locations, ElementsAre(Location{0, 0}, Location{0, 1}, Location{1, 0}));
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-1", "1:2-2", "0:3-3"));
  EXPECT_EQ(plan.invocations.back().source, (Location{1, 0}));
  EXPECT_EQ(plan.invocations.back().destination, std::nullopt);
}

// peer: async_pipe instantiate_partition
TEST(Plan, AlternatesBetweenReusedLayersOfManyStages) {
  const Plan plan = plan_of("ABCABCD", {1, 1, 2});
  EXPECT_THAT(stages(plan), ElementsAre(0, 1, 2, 0, 1, 2, 2));
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-0", "1:1-1", "2:2-2", "0:3-3", "1:4-4", "2:5-6"));
  EXPECT_EQ(plan.invocations[3].source, (Location{2, 0}));
  EXPECT_EQ(plan.invocations[3].destination, (Location{1, 0}));
  EXPECT_EQ(plan.links.size(), 5u);
}

// The three plans that the peer's planner gets wrong without an error.

TEST(Plan, RunsLayersBetweenTwoUsesOnce) {
  const Plan plan = plan_of("ABAC", {1, 2});
  EXPECT_EQ(way(plan), "ABAC");
  EXPECT_THAT(stages(plan), ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-0", "1:1-1", "0:2-2", "1:3-3"));
  EXPECT_THAT(plan.locations, ElementsAre(Location{0, 0}, Location{1, 0}, Location{1, 1}));
}

TEST(Plan, RunsALayerTwiceInARow) {
  const Plan plan = plan_of("AAB", {1, 1});
  EXPECT_EQ(way(plan), "AAB");
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-1", "1:2-2"));
  EXPECT_EQ(plan.invocations[0].destination, (Location{0, 0}));
  EXPECT_EQ(plan.invocations[1].source, (Location{0, 0}));
}

TEST(Plan, EndsWithARepeatedLayer) {
  const Plan plan = plan_of("ABA", {1, 1});
  EXPECT_EQ(way(plan), "ABA");
  EXPECT_THAT(ranges(plan), ElementsAre("0:0-0", "1:1-1", "0:2-2"));
}

TEST(Plan, EndsWhereverTheLastUseIs) {
  for (int last = 0; last < 3; ++last) {
    const std::string letters = std::string("ABC") + "ABC"[last];
    const Plan plan = plan_of(letters, {1, 1, 1});
    EXPECT_EQ(plan.layer_ranges.back().stage, last) << letters;
    EXPECT_EQ(plan.invocations.back().destination, std::nullopt) << letters;
    EXPECT_EQ(way(plan), letters);
  }
}

TEST(Plan, LetsOneWorkerOwnSeveralStages) {
  PlanRequest request = request_of("ABCD", {1, 1, 1, 1});
  request.workers = {"x", "y", "x", "y"};
  const Plan plan = make_plan(request);
  EXPECT_THAT(plan.workers, ElementsAre("x", "y"));
  EXPECT_THAT(plan.worker_of_stage, ElementsAre(0, 1, 0, 1));
  // Adjacent stages of one worker stay separate layer ranges: an interleaved schedule needs them.
  EXPECT_EQ(plan.layer_ranges.size(), 4u);
  const auto placement = plan.placement(6);
  EXPECT_THAT(placement.rank_of_stage, ElementsAre(0, 1, 0, 1));
  EXPECT_EQ(placement.micro_batches, 6);
  EXPECT_EQ(placement.ranks, 2);
}

TEST(Plan, KeepsStagesOfOneWorkerThatFollowEachOtherApart) {
  PlanRequest request = request_of("AB", {1, 1});
  request.workers = {"x", "x"};
  EXPECT_EQ(make_plan(request).layer_ranges.size(), 2u);
}

TEST(Plan, FindsTheLayerRangeOfEveryUse) {
  const Plan plan = plan_of("ABACAAB", {1, 2});
  for (std::size_t s = 0; s < plan.layer_ranges.size(); ++s) {
    for (int order = plan.layer_ranges[s].first; order <= plan.layer_ranges[s].last; ++order)
      EXPECT_EQ(plan.layer_range_of(order), static_cast<int>(s));
  }
}

TEST(Plan, DescribesAUseByLayerMethodOrderStageAndWorker) {
  PlanRequest request = request_of("ABA", {1, 1});
  request.uses[2].method = "back";
  const Plan plan = make_plan(request);
  EXPECT_EQ(plan.describe(1), "layer 'B' (order 1, stage 1 on 'w1')");
  EXPECT_EQ(plan.describe(2), "layer 'A.back' (order 2, stage 0 on 'w0')");
  EXPECT_EQ(to_text(plan),
            "layer range 0: stage 0 on w0: A\nlayer range 1: stage 1 on w1: B\n"
            "layer range 2: stage 0 on w0: A.back\n");
}

// Skip connections: the peer's test_inspect_skip_layout and test_verify_skippables.

PlanRequest with_skip(std::vector<int> balance, int from, int to) {
  PlanRequest request = request_of("ABCD", std::move(balance));
  request.uses[static_cast<std::size_t>(from)].stashes = {"s"};
  request.uses[static_cast<std::size_t>(to)].pops = {"s"};
  return request;
}

// peer suite: pipe inner_1_to_inner_2, adjoining, far, pop_2_from_different_partitions, namespace: same
// peer suite: pipe test_verify_skippables `matching`, `stash_not_pop`, `pop_unknown`, `stash_again`,
//   `pop_again`, `double_stash_pop`, `double_stash_pop_but_isolated`; `stash_pop_together_different_names`:
//   same: before any layer is built
TEST(PlanSkips, StayInsideALayerRangeWithoutALink) {
  const Plan plan = make_plan(with_skip({4}, 0, 2));
  EXPECT_TRUE(plan.links.empty());
  ASSERT_EQ(plan.local_skips.size(), 1u);
  EXPECT_EQ(plan.local_skips[0].name, "s");
  EXPECT_EQ(plan.local_skips[0].stashed_by, 0);
  EXPECT_EQ(plan.local_skips[0].popped_by, 2);
}

TEST(PlanSkips, GoStraightToTheConsumer) {
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{{0, 1}, {0, 3}, {1, 3}}) {
    const Plan plan = make_plan(with_skip({1, 1, 1, 1}, from, to));
    EXPECT_TRUE(plan.local_skips.empty());
    ASSERT_EQ(plan.links.size(), 4u);
    EXPECT_EQ(plan.links[3].from, from);
    EXPECT_EQ(plan.links[3].to, to);
    EXPECT_EQ(plan.links[3].skip, "s");
    EXPECT_THAT(to_text(plan), HasSubstr(fmt::format("skip 's': layer range {} to {}", from, to)));
  }
}

TEST(PlanSkips, AreALinkBetweenTwoLayerRangesOfOneStage) {
  PlanRequest request = request_of("ABA", {1, 1});
  request.uses[0].stashes = {"s"};
  request.uses[2].pops = {"s"};
  const Plan plan = make_plan(request);
  ASSERT_EQ(plan.links.size(), 3u);
  EXPECT_EQ(plan.links[2].from, 0);
  EXPECT_EQ(plan.links[2].to, 2);
}

TEST(PlanSkips, MatchNamesWithinTheirSpaceOnly) {
  PlanRequest request = request_of("ABCD", {2, 2});
  request.uses[0].stashes = {"s"};
  request.uses[0].space = "left";
  request.uses[1].stashes = {"s"};
  request.uses[1].space = "right";
  request.uses[2].pops = {"s"};
  request.uses[2].space = "right";
  request.uses[3].pops = {"s"};
  request.uses[3].space = "left";
  const Plan plan = make_plan(request);
  std::map<int, int> popped_by;
  for (const Link& link : plan.links) {
    if (!link.skip.empty()) popped_by[link.stashed_by] = link.popped_by;
  }
  EXPECT_EQ(popped_by, (std::map<int, int>{{0, 3}, {1, 2}}));
}

TEST(PlanSkips, ThatAreNeverPoppedAreRejected) {
  PlanRequest request = request_of("AB", {1, 1});
  request.uses[0].stashes = {"s"};
  EXPECT_THAT(error_of(request), HasSubstr("layer 'A' (order 0) stashes 's', which no later layer pops"));
}

TEST(PlanSkips, ThatAreNeverStashedAreRejected) {
  PlanRequest request = request_of("AB", {1, 1});
  request.uses[1].pops = {"s"};
  EXPECT_THAT(error_of(request), HasSubstr("layer 'B' (order 1) pops 's', which no earlier layer stashes"));
  // A pop before its stash, or in the same layer, is an error as well.
  request.uses[0].pops = {"t"};
  request.uses[1].stashes = {"t"};
  request.uses[1].pops = {"t"};
  const std::string text = error_of(request);
  EXPECT_THAT(text, HasSubstr("layer 'A' (order 0) pops 't', which no earlier"));
  EXPECT_THAT(text, HasSubstr("layer 'B' (order 1) pops 't', which no earlier"));
}

TEST(PlanSkips, StashedTwiceAreRefused) {
  PlanRequest request = request_of("ABC", {1, 2});
  request.uses[0].stashes = request.uses[1].stashes = {"s"};
  request.uses[2].pops = {"s"};
  EXPECT_THAT(error_of(request),
              HasSubstr("layer 'B' (order 1) stashes 's', which layer 'A' (order 0) has stashed already"));
}

TEST(PlanSkips, PoppedTwiceAreRefused) {
  PlanRequest request = request_of("ABC", {1, 2});
  request.uses[0].stashes = {"s"};
  request.uses[1].pops = request.uses[2].pops = {"s"};
  EXPECT_THAT(error_of(request),
              HasSubstr("layer 'C' (order 2) pops 's', which layer 'B' (order 1) has popped already"));
}

TEST(PlanSkips, StashedAndPoppedTwiceNeedSpacesOfTheirOwn) {
  PlanRequest request = request_of("ABCD", {2, 2});
  request.uses[0].stashes = request.uses[2].stashes = {"s"};
  request.uses[1].pops = request.uses[3].pops = {"s"};
  EXPECT_THAT(error_of(request), HasSubstr("give one of them another space (Use::in_space)"));
  request.uses[2].space = request.uses[3].space = "second";
  const Plan plan = make_plan(request);
  EXPECT_EQ(plan.local_skips.size(), 2u);
}

// Invalid plans.

// peer suite: pipe balance_wrong_length, balance_less_than_1, too_few_devices, verify_module_*: better: one
//   error lists everything that is wrong
TEST(PlanErrors, NameABalanceThatDoesNotAddUp) {
  EXPECT_THAT(error_of(request_of("ABC", {1, 1})), HasSubstr("balance [1, 1] has 2 layers, the model has 3"));
  EXPECT_THAT(error_of(request_of("ABC", {3, 1})), HasSubstr("has 4 layers, the model has 3"));
  // The balance counts layers, not uses.
  EXPECT_THAT(error_of(request_of("ABA", {2, 1})), HasSubstr("the model has 2 distinct ones"));
}

TEST(PlanErrors, NameAStageWithoutALayer) {
  EXPECT_THAT(error_of(request_of("AB", {2, 0})), HasSubstr("balance[1] is 0: every stage needs a layer"));
  EXPECT_THAT(error_of(request_of("AB", {3, -1})), HasSubstr("balance[1] is -1"));
}

TEST(PlanErrors, NameABalanceThatNeedsMoreWorkers) {
  PlanRequest request = request_of("ABC", {1, 1, 1});
  request.workers.pop_back();
  EXPECT_THAT(error_of(request), HasSubstr("3 stages need as many owners; workers has 2"));
}

TEST(PlanErrors, AskForLayers) {
  EXPECT_THAT(error_of(request_of("", {1})), HasSubstr("there is no layer: add layers to Layers"));
  EXPECT_THAT(error_of(request_of("", {})), HasSubstr("there is no layer"));
}

TEST(PlanErrors, ListEverythingThatIsWrongAtOnce) {
  PlanRequest request = request_of("ABC", {2, 0});
  request.workers = {"x"};
  request.uses[0].stashes = {"left"};
  request.uses[1].pops = {"unknown"};
  const std::string text = error_of(request);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;
  for (const char* part : {"balance[1]", "the model has 3", "workers has 1", "'left'", "'unknown'"})
    EXPECT_THAT(text, HasSubstr(part));
}

// Random plans.

struct RandomRequest {
  PlanRequest request;
  std::string text;
};

RandomRequest random_request(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::size_t below) { return static_cast<int>(random() % below); };
  const int length = 1 + pick(14);
  std::string letters;
  char fresh = 'A';
  for (int i = 0; i < length; ++i) {
    const bool again = fresh > 'A' && pick(3) == 0;
    letters += again ? static_cast<char>('A' + pick(static_cast<std::size_t>(fresh - 'A'))) : fresh++;
  }
  const int distinct = fresh - 'A';
  const int parts = 1 + pick(static_cast<std::size_t>(distinct));
  std::vector<int> balance(static_cast<std::size_t>(parts), 1);
  for (int i = parts; i < distinct; ++i) ++balance[static_cast<std::size_t>(pick(balance.size()))];
  RandomRequest made{request_of(letters, balance), letters};
  for (auto& worker : made.request.workers) worker = "w" + std::to_string(pick(3));
  for (int skip = 0; skip < pick(4); ++skip) {
    if (length < 2) break;
    const int from = pick(static_cast<std::size_t>(length - 1));
    const int to = from + 1 + pick(static_cast<std::size_t>(length - from - 1));
    made.request.uses[static_cast<std::size_t>(from)].stashes.push_back(fmt::format("s{}", skip));
    made.request.uses[static_cast<std::size_t>(to)].pops.push_back(fmt::format("s{}", skip));
  }
  made.text = fmt::format("seed {}: {}", seed, letters);
  return made;
}

void expect_chain(const Plan& plan, const std::string& letters) {
  EXPECT_EQ(way(plan), letters);
  for (std::size_t i = 0; i < plan.invocations.size(); ++i) {
    const Invocation& use = plan.invocations[i];
    EXPECT_EQ(use.order, static_cast<int>(i));
    EXPECT_EQ(use.here, plan.locations[static_cast<std::size_t>(use.layer)]);
    EXPECT_EQ(use.source.has_value(), i > 0);
    EXPECT_EQ(use.destination.has_value(), i + 1 < plan.invocations.size());
    if (i == 0) continue;
    EXPECT_EQ(use.source, plan.invocations[i - 1].here);
    EXPECT_EQ(plan.invocations[i - 1].destination, use.here);
  }
}

void expect_longest_layer_ranges(const Plan& plan) {
  int next = 0;
  for (std::size_t s = 0; s < plan.layer_ranges.size(); ++s) {
    const LayerRange& range = plan.layer_ranges[s];
    EXPECT_EQ(range.first, next);
    EXPECT_LE(range.first, range.last);
    EXPECT_EQ(range.worker, plan.worker_of_stage[static_cast<std::size_t>(range.stage)]);
    for (int order = range.first; order <= range.last; ++order)
      EXPECT_EQ(plan.invocations[static_cast<std::size_t>(order)].here.stage, range.stage);
    if (s > 0) {
      EXPECT_NE(range.stage, plan.layer_ranges[s - 1].stage) << "two that could be one";
    }
    next = range.last + 1;
  }
  EXPECT_EQ(next, static_cast<int>(plan.invocations.size()));
}

void expect_skips_once(const Plan& plan, const PlanRequest& request) {
  std::size_t declared = 0, outputs = 0;
  for (const Use& use : request.uses) declared += use.stashes.size();
  for (const Link& link : plan.links) {
    EXPECT_LT(link.from, link.to);
    EXPECT_EQ(plan.layer_range_of(link.stashed_by), link.from);
    EXPECT_EQ(plan.layer_range_of(link.popped_by), link.to);
    outputs += link.skip.empty() ? 1 : 0;
  }
  EXPECT_EQ(outputs, plan.layer_ranges.size() - 1);
  for (std::size_t s = 0; s < outputs; ++s) EXPECT_EQ(plan.links[s].from, static_cast<int>(s));
  EXPECT_EQ(plan.links.size() - outputs + plan.local_skips.size(), declared);
}

TEST(Plan, KeepsItsInvariantsForRandomModels) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    const RandomRequest random = random_request(seed);
    SCOPED_TRACE(random.text);
    const Plan plan = make_plan(random.request);
    expect_chain(plan, [&] {
      std::string letters;
      for (const Use& use : random.request.uses)
        letters += random.request.layers[static_cast<std::size_t>(use.layer)];
      return letters;
    }());
    expect_longest_layer_ranges(plan);
    expect_skips_once(plan, random.request);
    std::map<int, int> on_stage;
    for (const Location& location : plan.locations) {
      EXPECT_EQ(location.index, on_stage[location.stage]++);
    }
    for (std::size_t stage = 0; stage < random.request.balance.size(); ++stage) {
      EXPECT_EQ(on_stage[static_cast<int>(stage)], random.request.balance[stage]);
      EXPECT_EQ(plan.workers[static_cast<std::size_t>(plan.worker_of_stage[stage])],
                random.request.workers[stage]);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Drawings.

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// TORCHSPAN_DRAWINGS names a folder where the drawings are kept.
void keep(const std::string& name, const std::string& svg) {
  if (const char* folder = std::getenv("TORCHSPAN_DRAWINGS"))
    std::ofstream(std::string(folder) + "/" + name + ".svg") << svg;
}

TEST(PlanDrawing, HasABoxPerUseARowPerStageAndADashedLinePerSkip) {
  PlanRequest request = request_of("ABAC", {1, 2});
  request.layers = {"Linear<float> & co", "Convolution", "torch::nn::MultiheadAttention"};
  request.uses[2].method = "back";
  request.uses[0].stashes = {"residual"};
  request.uses[3].pops = {"residual"};
  const std::string svg = to_svg(make_plan(request));
  keep("abac", svg);
  EXPECT_EQ(count(svg, ">order "), 4);
  EXPECT_EQ(count(svg, ">stage "), 2);
  EXPECT_EQ(count(svg, "stroke-dasharray"), 1);
  EXPECT_EQ(count(svg, "stroke=\"#333\""), 5) << "in, out, and three between the four";
  EXPECT_THAT(svg, HasSubstr("Linear&lt;float&gt; &amp; co"));
  EXPECT_EQ(count(svg, "<svg"), 1);
  EXPECT_EQ(count(svg, "</svg>"), 1);
  EXPECT_EQ(count(svg, "http"), 1) << "self-contained but for the name space";
}

TEST(PlanDrawing, ShowsSkipsNearAndFar) {
  PlanRequest request = request_of("ABCDEBFA", {2, 2, 2});
  request.uses[0].stashes = {"far", "further"};
  request.uses[1].stashes = {"near"};
  request.uses[2].stashes = {"middle"};
  request.uses[3].pops = {"near"};
  request.uses[4].pops = {"far"};
  request.uses[5].pops = {"middle"};
  request.uses[6].pops = {"further"};
  request.uses[6].stashes = {"back"};
  request.uses[7].pops = {"back"};
  const std::string svg = to_svg(make_plan(request));
  keep("far", svg);
  EXPECT_EQ(count(svg, "stroke-dasharray"), 5);
  for (const char* name : {">far<", ">further<", ">near<", ">middle<", ">back<"})
    EXPECT_EQ(count(svg, name), 1) << name;
}

TEST(PlanDrawing, DrawsEveryRandomPlan) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    const RandomRequest random = random_request(seed);
    const Plan plan = make_plan(random.request);
    const std::string svg = to_svg(plan);
    EXPECT_EQ(count(svg, ">order "), static_cast<int>(plan.invocations.size())) << random.text;
    EXPECT_EQ(count(svg, "nan"), 0) << random.text;
  }
}

}  // namespace
}  // namespace torchspan::pipeline::plan_test
