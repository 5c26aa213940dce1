#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "launch/commands/schedule_command.h"

namespace torchspan::launch::schedule_costs_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::string error_of(const std::string& text) {
  try {
    parse_costs(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }
  return "accepted";
}

TEST(ScheduleCosts, AFileGivesWholeOrSplitBackwardsByStage) {
  const auto [costs, unit] = parse_costs(
      R"({"stages": [{"forward": 1.5, "backward": 3}, {"forward": 1, "input_gradient": 2, "weight_gradient": 0.5,
                      "transfer": 0.25, "activation": 8, "weight_input": 4}]})");
  ASSERT_EQ(costs.size(), 2u);
  EXPECT_EQ(unit, schedule::MemoryUnit::kAny);
  EXPECT_EQ(costs[0].forward, 1500us);
  EXPECT_EQ(costs[0].input_gradient, 1500us);
  EXPECT_EQ(costs[0].weight_gradient, 1500us);
  EXPECT_EQ(costs[0].weight_input, std::nullopt);
  EXPECT_EQ(costs[1].input_gradient, 2ms);
  EXPECT_EQ(costs[1].weight_gradient, 500us);
  EXPECT_EQ(costs[1].transfer, 250us);
  EXPECT_EQ(costs[1].activation, 8);
  EXPECT_EQ(costs[1].weight_input, 4);
}

TEST(ScheduleCosts, ReadsWhatAProgramWrites) {
  const std::vector<schedule::Costs> costs = {{.forward = 1234567ns,
                                               .input_gradient = 3ms,
                                               .weight_gradient = 1ns,
                                               .transfer = 5us,
                                               .activation = 0.75},
                                              {.forward = 0ns, .activation = 1e6, .weight_input = 0.125},
                                              {.forward = 1ns, .recomputation = 7}};
  const auto [back, unit] = parse_costs(schedule::costs_json(costs, schedule::MemoryUnit::kBytes));
  EXPECT_EQ(unit, schedule::MemoryUnit::kBytes);
  ASSERT_EQ(back.size(), costs.size());
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    EXPECT_EQ(back[stage].forward, costs[stage].forward);
    EXPECT_EQ(back[stage].input_gradient, costs[stage].input_gradient);
    EXPECT_EQ(back[stage].weight_gradient, costs[stage].weight_gradient);
    EXPECT_EQ(back[stage].transfer, costs[stage].transfer);
    EXPECT_EQ(back[stage].activation, costs[stage].activation);
    EXPECT_EQ(back[stage].weight_input, costs[stage].weight_input);
    EXPECT_EQ(back[stage].recomputation, costs[stage].recomputation);
  }
}

TEST(ScheduleCosts, NamesTheWrongEntryOfAFile) {
  EXPECT_THAT(error_of("{"), HasSubstr("not JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("expected {\"stages\""));
  EXPECT_THAT(error_of(R"({"stages": []})"), HasSubstr("expected {\"stages\""));
  EXPECT_THAT(error_of(R"({"memory": "MiB", "stages": [{"forward": 1, "backward": 1}]})"),
              HasSubstr("memory is \"MiB\"; the only unit is \"bytes\""));
  EXPECT_THAT(error_of(R"({"stages": [1]})"), HasSubstr("stages[0] is not an object"));
  EXPECT_THAT(error_of(R"({"stages": [{"backward": 1}]})"), HasSubstr("stages[0] has no forward"));
  EXPECT_THAT(error_of(R"({"stages": [{"forward": 1, "input_gradient": 1}]})"),
              HasSubstr("stages[0] has no weight_gradient"));
  EXPECT_THAT(error_of(R"({"stages": [{"forward": 1, "backward": 2, "weight_gradient": 1}]})"),
              HasSubstr("has backward and weight_gradient; remove one"));
  EXPECT_THAT(error_of(R"({"stages": [{"forward": 1, "backward": "2"}]})"),
              HasSubstr("backward of stages[0] is not a number"));
  EXPECT_THAT(error_of(R"({"stages": [{"forward": 1, "backward": 2}, {"forward": -1, "backward": 2}]})"),
              HasSubstr("forward of stages[1] is -1: from 0"));
  EXPECT_THAT(error_of(R"({"stages": [{"forward": 1, "backward": 2, "activation": -1}]})"),
              HasSubstr("activation of stages[0] is -1; expected"));
  EXPECT_THAT(error_of(R"({"stages": [{"forwards": 1}]})"), HasSubstr("unknown key 'forwards'"));
}

double limit_of(const std::string& memory, schedule::MemoryUnit unit) {
  ScheduleOptions options;
  options.memory = memory;
  return memory_limit(options, unit);
}

TEST(ScheduleCosts, AMemoryLimitIsInTheUnitOfTheCosts) {
  using enum schedule::MemoryUnit;
  for (const auto unit : {kAny, kBytes}) {
    EXPECT_EQ(limit_of("2.5", unit), 2.5);
    EXPECT_EQ(limit_of("", unit), std::numeric_limits<double>::infinity());
    EXPECT_EQ(limit_of("0", unit), std::numeric_limits<double>::infinity());
    for (const char* wrong : {"-1", "nan", "GiB", "1 GiB", "1GIB", "4x", "-1GiB"}) {
      EXPECT_THROW(limit_of(wrong, unit), Error) << wrong;
    }
  }
  EXPECT_EQ(limit_of("1.5GiB", kBytes), 1.5 * 1024 * 1024 * 1024);
  EXPECT_EQ(limit_of("3MB", kBytes), 3e6);
  EXPECT_EQ(limit_of("100B", kBytes), 100);
  try {
    limit_of("4GiB", kAny);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("--memory 4GiB: the costs do not say how many bytes"));
    EXPECT_THAT(error.message(), HasSubstr("measure_costs"));
  }
}

TEST(ScheduleCosts, PrintsBytesInTheLargestUnit) {
  using enum schedule::MemoryUnit;
  EXPECT_EQ(memory_text(4, kAny), "4");
  EXPECT_EQ(memory_text(1023, kBytes), "1023 B");
  EXPECT_EQ(memory_text(1536, kBytes), "1.5 KiB");
  EXPECT_EQ(memory_text(3.25 * 1024 * 1024 * 1024, kBytes), "3.25 GiB");
}

}  // namespace
}  // namespace torchspan::launch::schedule_costs_test
