#include "core/api/step_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>

#include "core/api/sim_executor.h"

namespace torchspan::step_part_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StepPart, IsThatOfTheInnermostScopeOfTheThread) {
  const StepPart outer{StepPart::Kind::kForward, 1, 2, -1, 7};
  const StepPart inner{StepPart::Kind::kRepeatedForward, 1, 0, -1, 7};
  EXPECT_EQ(StepPartScope::current(), StepPart());
  {
    const StepPartScope one(outer);
    EXPECT_EQ(StepPartScope::current(), outer);
    {
      const StepPartScope other(inner);
      EXPECT_EQ(StepPartScope::current(), inner);
    }
    EXPECT_EQ(StepPartScope::current(), outer);
    SimExecutor executor(1);
    executor.run([] { EXPECT_EQ(StepPartScope::current(), StepPart()); });
  }
  EXPECT_EQ(StepPartScope::current(), StepPart());
}

TEST(StepPart, IsDescribed) {
  EXPECT_EQ(describe(StepPart()), "");
  EXPECT_EQ(describe({StepPart::Kind::kRepeatedForward, 1, 2, -1, 7}),
            " in the repeated forward of micro-batch 2 through layer range 1 of step 7");
  EXPECT_THAT(describe({static_cast<StepPart::Kind>(77), 1, 2, -1, 7}), HasSubstr("unknown part"));
}

TEST(StepPart, NamesTheUnitBeforeThePartInWhichItRuns) {
  EXPECT_EQ(describe({.unit = 3}), " of unit #3");
  EXPECT_EQ(describe({StepPart::Kind::kForward, 1, 2, 3, 7}),
            " of unit #3 in the forward of micro-batch 2 through layer range 1 of step 7");
  EXPECT_NE(StepPart{.unit = 3}, StepPart{.unit = 4});
}

TEST(StepPart, KnowsWhetherAnOperationBeganInItOrInAPartInsideIt) {
  StepPartScope::begin_operation("all_reduce");
  const StepPartScope before({StepPart::Kind::kForward, 0, 0, -1, 1});
  EXPECT_FALSE(before.communicated());
  {
    const StepPartScope inside({StepPart::Kind::kForward, 3, 0, -1, 1});
    StepPartScope::begin_operation("all_reduce");
    EXPECT_TRUE(inside.communicated());
  }
  EXPECT_TRUE(before.communicated());
  const StepPartScope after({StepPart::Kind::kForward, 0, 0, -1, 1});
  EXPECT_FALSE(after.communicated());
}

TEST(StepPart, RefusesOperationsWhereTheirOrderDependsOnTime) {
  const StepPartScope unordered({StepPart::Kind::kBackward, 1, 2, -1, 7}, "use another schedule");
  const StepPartScope inside({StepPart::Kind::kForward, 0, 0, -1, 1});
  try {
    StepPartScope::begin_operation("all_reduce");
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.message(), AllOf(HasSubstr("all_reduce in the backward of micro-batch 2"),
                                       HasSubstr("use another schedule")));
  }
  EXPECT_FALSE(unordered.communicated());
}

}  // namespace
}  // namespace torchspan::step_part_test
