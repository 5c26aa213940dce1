#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <regex>

#include <torchspan/core/error.h>

#include "schedule/test_tables.h"

namespace torchspan::schedule::draw_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Whether tags are closed in the order in which they were opened, and the text contains no unescaped < or &.
std::string xml_complaint(const std::string& xml) {
  const std::regex entity("^&(amp|lt|gt);"), rest("^/?(\\w+)[\\s\\S]*$"),
      whole("/?\\w+(\\s+[\\w:-]+=\"[^\"<]*\")*/?");
  std::vector<std::string> open;
  for (std::size_t at = 0; at < xml.size(); ++at) {
    if (xml[at] == '&' && !std::regex_search(xml.substr(at, 6), entity)) return "stray &";
    if (xml[at] == '>') return "stray > at " + std::to_string(at);
    if (xml[at] != '<') continue;
    const std::size_t end = xml.find('>', at);
    if (end == std::string::npos) return "tag without end";
    const std::string tag = xml.substr(at + 1, end - at - 1);
    const std::string name = std::regex_replace(tag, rest, "$1");
    if (!std::regex_match(tag, whole)) return "not a tag: " + tag;
    if (tag.front() == '/') {
      if (open.empty() || open.back() != name) return "closes what is not open: " + tag;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

/// An action's rectangle in a drawing.
struct Cell {
  std::string colour, action;
  double x = 0, y = 0, width = 0;
};

std::vector<Cell> cells_of(const std::string& svg) {
  const std::regex cell(
      "<rect class=\"[tu] (\\w+)\" x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\" "
      "height=\"[0-9.]+\"><title>"
      "(\\w+): ");
  std::vector<Cell> cells;
  for (std::sregex_iterator at(svg.begin(), svg.end(), cell), end; at != end; ++at) {
    cells.push_back({(*at)[1], (*at)[5], std::stod((*at)[2]), std::stod((*at)[3]), std::stod((*at)[4])});
  }
  return cells;
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

Timeline simulated(const Table& table, std::string name = "", Costs costs = {}) {
  Timeline timeline = simulate(table, {costs});
  if (!name.empty()) timeline.name = std::move(name);
  return timeline;
}

TEST(DrawText, HasALinePerRankAndAColumnPerSlot) {
  EXPECT_EQ(draw_text(simulated(one_forward_one_backward(Shape{.ranks = 2, .micro_batches = 3}))),
            "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
            "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n");
}

TEST(DrawText, NamesTheStageWhereARankHasSeveral) {
  EXPECT_EQ(draw_text(simulated(forward_only({.rank_of_stage = {0, 0, 1}, .micro_batches = 1}))),
            "rank 0  0F0 1F0 .\n"
            "rank 1  .   .   2F0\n");
}

TEST(DrawText, RoundsToSlotsOfTheShortestAction) {
  const Costs costs{.forward = Duration{10}, .input_gradient = Duration{9}, .weight_gradient = Duration{5}};
  EXPECT_EQ(draw_text(simulated(gpipe({.rank_of_stage = {0}, .micro_batches = 2}), "", costs)),
            "rank 0  F0 F1 B1 B0---\n");
}

TEST(DrawText, StaysWithinBoundsWhenOneActionIsTiny) {
  Timeline timeline = simulated(forward_only({.rank_of_stage = {0, 1}, .micro_batches = 2}));
  timeline.spans[0] = {{{ActionKind::kForward, 0, 0}, Duration{0}, Duration{1}},
                       {{ActionKind::kForward, 0, 1}, Duration{1}, Duration{1'000'000'000}}};
  timeline.spans[1] = {{{ActionKind::kForward, 1, 0}, Duration{2}, Duration{2}},
                       {{ActionKind::kForward, 1, 1}, Duration{2}, Duration{2}}};
  timeline.makespan = Duration{1'000'000'000};
  EXPECT_THAT(draw_text(timeline),
              ::testing::AllOf(HasSubstr("rank 0  F0 F1---"), HasSubstr("rank 1  F0 F1 .")));
  EXPECT_LT(draw_text(timeline).size(), 4000u);
}

TEST(DrawSvg, IsWellFormedAndNamesWhatMatters) {
  const std::string svg = draw_svg(
      {simulated(one_forward_one_backward(Shape{.ranks = 4, .micro_batches = 8}), "a<b & \"c\"\x01")});
  EXPECT_EQ(xml_complaint(svg), "");
  EXPECT_THAT(svg, HasSubstr(">a&lt;b &amp; \"c\": 33 ns, 27.3 % idle</text>"));
  EXPECT_THAT(svg, HasSubstr(">rank 3</text>"));
  EXPECT_EQ(count(svg, ">idle 9 ns</text>"), 4);
  for (const char* peak : {"peak 4", "peak 3", "peak 2", "peak 1"}) EXPECT_EQ(count(svg, peak), 1) << peak;
}

TEST(DrawSvg, ColoursAndNumbersEachAction) {
  const std::string svg = draw_svg({simulated(zero_bubble_h1({.ranks = 2, .micro_batches = 3}))});
  std::map<std::string, int> colours;
  for (const Cell& cell : cells_of(svg)) {
    ++colours[cell.colour];
    EXPECT_EQ(cell.colour.front(), cell.action[1]) << cell.action;
  }
  EXPECT_EQ(colours, (std::map<std::string, int>{{"F0", 6}, {"I0", 6}, {"W0", 6}}));
  for (const char* number : {"0", "1", "2"}) EXPECT_GE(count(svg, ">" + std::string(number) + "</text>"), 6);
}

TEST(DrawSvg, ExplainsTheKindsInUse) {
  const std::string halves = draw_svg({simulated(zero_bubble_h1({.ranks = 2, .micro_batches = 3}))});
  EXPECT_THAT(halves, HasSubstr(">weight gradient</text>"));
  EXPECT_THAT(halves, Not(HasSubstr(">backward</text>")));
  const std::string whole = draw_svg({simulated(gpipe({.rank_of_stage = {0}, .micro_batches = 1}))});
  EXPECT_THAT(whole, Not(HasSubstr("gradient</text>")));
  EXPECT_THAT(whole, Not(HasSubstr("lighter")));
  EXPECT_THAT(draw_svg({simulated(gpipe({.rank_of_stage = {0, 0}, .micro_batches = 1}))}),
              HasSubstr("lighter"));
}

TEST(DrawSvg, LaterStagesOfARankAreOfALighterColour) {
  const Table table = interleaved({.ranks = 2, .micro_batches = 2, .stages_per_rank = 2});
  const std::string svg = draw_svg({simulated(table)});
  for (const Cell& cell : cells_of(svg)) {
    EXPECT_EQ(cell.colour.back(), cell.action.front() < '2' ? '0' : '1') << cell.action;
  }
  const auto brightness = [&](const std::string& colour) {
    std::smatch parts;
    if (!std::regex_search(svg, parts, std::regex("\\." + colour + "\\{fill:#(\\w\\w)(\\w\\w)(\\w\\w)\\}")))
      return -1;
    int sum = 0;
    for (std::size_t part = 1; part <= 3; ++part) sum += std::stoi(parts[part], nullptr, 16);
    return sum;
  };
  for (const std::string kind : {"F", "B", "I", "W"}) {
    EXPECT_GT(brightness(kind + "0"), 0);
    EXPECT_GT(brightness(kind + "1"), brightness(kind + "0") + 50);
  }
}

TEST(DrawSvg, PutsThePlanAndTheMeasuredStepOnOneScale) {
  const Table table = one_forward_one_backward(Shape{.ranks = 3, .micro_batches = 5});
  const Timeline plan = simulated(table, "plan");
  const Timeline measured = simulated(table, "measured", {.forward = Duration{2}, .transfer = Duration{1}});
  const std::string svg = draw_svg({plan, measured});
  EXPECT_EQ(xml_complaint(svg), "");
  EXPECT_THAT(svg, HasSubstr("% longer than plan</text>"));
  EXPECT_THAT(svg, HasSubstr(">end of plan</text>"));
  const std::vector<Cell> cells = cells_of(svg);
  ASSERT_EQ(cells.size(), 60u);
  const double origin = cells.front().x;
  const double scale = (cells[9].x - origin) / static_cast<double>(plan.spans[0].back().start.count());
  std::size_t at = 0;
  double above = 0;
  for (const Timeline& timeline : {plan, measured}) {
    for (const auto& spans : timeline.spans) {
      EXPECT_GT(cells[at].y, above);
      above = cells[at].y;
      for (const ActionSpan& span : spans) {
        const Cell& cell = cells[at++];
        EXPECT_EQ(cell.action, to_string(span.action));
        EXPECT_EQ(cell.y, above);
        EXPECT_NEAR(cell.x, origin + scale * static_cast<double>(span.start.count()), 0.4);
        EXPECT_NEAR(cell.width, scale * static_cast<double>((span.end - span.start).count()), 0.2);
      }
    }
  }
}

TEST(DrawSvg, TheMemoryCurveRisesWithForwardsAndFallsWithBackwards) {
  const std::string svg = draw_svg({simulated(gpipe({.rank_of_stage = {0}, .micro_batches = 2}))});
  const std::vector<Cell> cells = cells_of(svg);
  ASSERT_EQ(cells.size(), 4u);
  std::smatch path;
  ASSERT_TRUE(std::regex_search(
      svg, path,
      std::regex(
          "d=\"M([0-9.]+) ([0-9.]+)H([0-9.]+)V([0-9.]+)H([0-9.]+)V([0-9.]+)H([0-9.]+)V([0-9.]+)H([0-9.]+)V"
          "([0-9.]+)H([0-9.]+)V([0-9.]+)z\"")));
  const auto value = [&](std::size_t group) { return std::stod(path[group]); };
  const double base = value(2), top = value(6);
  EXPECT_LT(top, base);
  EXPECT_NEAR(value(3), cells[0].x, 0.11);
  EXPECT_NEAR(value(4), (base + top) / 2, 0.11);  // one of two
  EXPECT_NEAR(value(5), cells[1].x, 0.11);
  EXPECT_NEAR(value(7), cells[3].x, 0.11);
  EXPECT_NEAR(value(8), (base + top) / 2, 0.11);
  EXPECT_NEAR(value(9), cells[3].x + cells[3].width, 0.11);
  EXPECT_NEAR(value(10), base, 0.11);
}

TEST(DrawSvg, ASecondCurveShowsWhatWeightGradientsWaitWith) {
  const std::string split = draw_svg({simulated(zero_bubble_h1({.ranks = 3, .micro_batches = 4}))});
  EXPECT_EQ(xml_complaint(split), "");
  EXPECT_EQ(count(split, "<path class=\"w\""), 1 + 3);  // in the legend and for each rank
  EXPECT_THAT(split, HasSubstr(">of them, for weight gradients</text>"));
  EXPECT_EQ(count(draw_svg({simulated(gpipe({.rank_of_stage = {0}, .micro_batches = 1}))}), "class=\"w\""),
            0);
}

TEST(DrawText, DistinguishesInputAndWeightGradients) {
  EXPECT_EQ(draw_text(simulated(zero_bubble_h1({.ranks = 2, .micro_batches = 2}))),
            "rank 0  F0 F1 .  I0 W0 I1 W1\n"
            "rank 1  .  F0 I0 F1 I1 W0 W1\n");
}

TEST(DrawSvg, DrawsAStepInWhichNothingHappens) {
  Timeline timeline;
  timeline.spans.resize(2);
  timeline.live.resize(2);
  timeline.idle.resize(2);
  timeline.peak_live.resize(2);
  EXPECT_EQ(xml_complaint(draw_svg({timeline})), "");
  EXPECT_EQ(draw_text(timeline), "rank 0\nrank 1\n");
}

TEST(Draw, RefusesTimelinesThatContradictThemselves) {
  const auto error_text = [](const std::function<void(Timeline&)>& damage) {
    Timeline timeline = simulated(gpipe({.rank_of_stage = {0}, .micro_batches = 2}), "mine");
    damage(timeline);
    try {
      draw_text(timeline);
      return std::string("accepted by draw_text");
    } catch (const Error&) {
    }
    try {
      draw_svg({timeline});
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("accepted by draw_svg");
  };
  EXPECT_THAT(error_text([](Timeline& t) { t.idle.clear(); }),
              HasSubstr("timeline 'mine' idle has 0 entries and spans 1"));
  EXPECT_THAT(error_text([](Timeline& t) { t.peak_live.push_back(0); }),
              HasSubstr("peak_live has 2 entries"));
  EXPECT_THAT(error_text([](Timeline& t) { t.live.clear(); }), HasSubstr("live has 0 entries"));
  EXPECT_THAT(error_text([](Timeline& t) { t.weight_inputs.emplace_back(); }),
              HasSubstr("weight_inputs has 2 entries"));
  EXPECT_THAT(error_text([](Timeline& t) { t.weight_inputs[0].pop_back(); }),
              HasSubstr("weight_inputs[0] has 3 entries and spans 4"));
  EXPECT_THAT(error_text([](Timeline& t) { t.live[0].pop_back(); }),
              HasSubstr("live[0] has 3 entries and spans 4"));
  EXPECT_THAT(error_text([](Timeline& t) { t.makespan = Duration{5}; }),
              HasSubstr("rank 0 runs 0B0 from 4 to 6 ns"));
  EXPECT_THAT(error_text([](Timeline& t) { t.spans[0][1].start = Duration{0}; }),
              HasSubstr("runs 0F1 from 0 to 2"));
  EXPECT_THAT(error_text([](Timeline& t) { t.spans[0][0].start = Duration{-1}; }),
              HasSubstr("runs 0F0 from -1 to 1"));
  EXPECT_THROW(draw_svg({}), Error);
}

}  // namespace
}  // namespace torchspan::schedule::draw_test
