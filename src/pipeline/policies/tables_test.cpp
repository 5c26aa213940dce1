// peer: pipelining pipeline_order
#include "pipeline/policies/tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::tables_test {
namespace {

using ::testing::HasSubstr;

/// Consecutive layers, one per stage, on the workers of `owners`.
Plan plan_on(const std::vector<std::string>& owners) {
  PlanRequest request;
  for (std::size_t layer = 0; layer < owners.size(); ++layer) {
    request.layers.push_back("layer" + std::to_string(layer));
    PlanRequest::Use use;
    use.layer = static_cast<int>(layer);
    request.uses.push_back(use);
  }
  request.balance.assign(owners.size(), 1);
  request.workers = owners;
  return make_plan(request);
}

void with_local(Schedule schedule, const std::vector<std::string>& owners, int max_in_flight,
                const std::function<void(const LocalPipeline&)>& body) {
  torchspan::testing::on_workers(1, 1, [&](Worker& worker) {
    PipelineOptions options;
    options.schedule = schedule;
    options.max_in_flight = max_in_flight;
    LocalPipeline local{worker, options, plan_on(owners)};
    body(local);
  });
}

const std::vector<std::string> kStraight{"a", "b", "c"};
const std::vector<std::string> kLooped{"a", "b", "a", "b"};

TEST(Tables, AreThoseOfTheSchedule) {
  with_local(Schedule::kGPipe, kStraight, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    tables.check();
    EXPECT_EQ(tables.find(StepKind::kTrain, 4)->actions, schedule::gpipe(local.plan.placement(4)).actions);
  });
  with_local(Schedule::k1F1B, kStraight, 2, [](const LocalPipeline& local) {
    Tables tables(local);
    EXPECT_EQ(tables.find(StepKind::kTrain, 6)->actions,
              schedule::one_forward_one_backward(local.plan.placement(6), 2).actions);
    EXPECT_NE(tables.find(StepKind::kTrain, 6)->actions,
              schedule::one_forward_one_backward(local.plan.placement(6)).actions)
        << "max_in_flight must matter";
  });
  with_local(Schedule::kInterleaved, kLooped, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    tables.check();
    EXPECT_EQ(tables.find(StepKind::kTrain, 4)->actions, schedule::interleaved({2, 4, 2}).actions);
  });
}

const std::vector<std::string> kV{"a", "b", "b", "a"};

TEST(Tables, OfSplitBackwardsAreThoseOfTheSchedule) {
  const auto expect_table = [](Schedule schedule, const std::vector<std::string>& owners, int micro_batches,
                               const schedule::Table& expected) {
    with_local(schedule, owners, 0, [&](const LocalPipeline& local) {
      Tables tables(local);
      tables.check();
      EXPECT_EQ(tables.find(StepKind::kTrain, micro_batches)->actions, expected.actions);
    });
  };
  expect_table(Schedule::kZBH1, kStraight, 4, schedule::zero_bubble_h1({3, 4, 1}));
  expect_table(Schedule::kZBH2, kStraight, 4, schedule::zero_bubble_h2({3, 4, 1}));
  expect_table(Schedule::kZB1P, kLooped, 4, schedule::interleaved_zero_bubble({2, 4, 2}));
  expect_table(Schedule::kZBV, kV, 4, schedule::zero_bubble_v({2, 4, 2}));
  expect_table(Schedule::kDualPipeV, kV, 4, schedule::dual_pipe_v({2, 4, 2}));
}

TEST(Tables, OfSplitBackwardsFallBackWhereTheyAreNotDefined) {
  with_local(Schedule::kZB1P, kLooped, 0, [](const LocalPipeline& local) {
    EXPECT_EQ(Tables(local).find(StepKind::kTrain, 5)->actions,
              schedule::one_forward_one_backward(local.plan.placement(5)).actions);
  });
  with_local(Schedule::kDualPipeV, kV, 0, [](const LocalPipeline& local) {
    EXPECT_EQ(Tables(local).find(StepKind::kTrain, 3)->actions,
              schedule::one_forward_one_backward(local.plan.placement(3)).actions);
  });
}

TEST(Tables, OfSplitBackwardsRejectOtherPlacements) {
  const auto expect_rejected = [](Schedule schedule, const std::vector<std::string>& owners) {
    with_local(schedule, owners, 0, [](const LocalPipeline& local) {
      try {
        Tables(local).check();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), HasSubstr("Schedule::k1F1B, which takes any plan"));
      }
    });
  };
  for (const Schedule schedule : {Schedule::kZBH1, Schedule::kZBH2}) {
    expect_rejected(schedule, kLooped);
    expect_rejected(schedule, kV);
  }
  expect_rejected(Schedule::kZB1P, kV);
  expect_rejected(Schedule::kZB1P, {"a", "b", "a"});
  for (const Schedule schedule : {Schedule::kZBV, Schedule::kDualPipeV}) {
    expect_rejected(schedule, kStraight);
    expect_rejected(schedule, kLooped);
  }
}

TEST(Tables, OfACustomScheduleMustFitThePlanAndHaveAllBackwards) {
  using Make = std::function<schedule::Table(const schedule::Placement&)>;
  const auto error_of = [](const Make& make) {
    std::string text;
    torchspan::testing::on_workers(1, 1, [&](Worker& worker) {
      PipelineOptions options;
      options.schedule = Schedule::kCustom;
      options.custom_schedule = make;
      const LocalPipeline local{worker, options, plan_on(kLooped)};
      try {
        EXPECT_EQ(Tables(local).find(StepKind::kTrain, 4)->rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
      } catch (const Error& error) {
        text = error.what();
      }
    });
    return text;
  };
  EXPECT_EQ(error_of([](const auto& placement) { return schedule::gpipe(placement); }), "");
  EXPECT_EQ(error_of([](const auto& placement) { return schedule::zero_bubble(placement, {{}}); }), "");
  EXPECT_THAT(error_of([](const auto&) {
                return schedule::gpipe(schedule::looped({2, 4, 1}));
              }),
              HasSubstr("the plan has layer ranges on workers 0, 1, 0, 1, 4 micro-batches"));
  EXPECT_THAT(error_of([](const auto&) {
                return schedule::gpipe(schedule::looped({2, 3, 2}));
              }),
              HasSubstr("with 3 micro-batches"));
  EXPECT_THAT(error_of([](const auto& placement) { return schedule::forward_only(placement); }),
              HasSubstr("in which micro-batches have no backward"));
  EXPECT_THAT(error_of([](const auto& placement) {
                schedule::Table table = schedule::gpipe(placement);
                std::reverse(table.actions[0].begin(), table.actions[0].end());
                return table;
              }),
              HasSubstr("wait"));
}

TEST(Tables, OfStepsWithoutBackwardsHaveForwardsOnly) {
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kInterleaved}) {
    with_local(schedule, kLooped, 0, [](const LocalPipeline& local) {
      Tables tables(local);
      for (const StepKind kind : {StepKind::kInfer, StepKind::kLoss}) {
        EXPECT_EQ(tables.find(kind, 5)->actions, schedule::forward_only(local.plan.placement(5)).actions);
      }
    });
  }
}

TEST(Tables, OfForwardsWhoseBackwardsComeLaterHaveAllForwardsFirst) {
  with_local(Schedule::k1F1B, kStraight, 1, [](const LocalPipeline& local) {
    Tables tables(local);
    EXPECT_EQ(tables.find(StepKind::kForward, 4)->actions, schedule::gpipe(local.plan.placement(4)).actions);
  });
}

TEST(Tables, DoNotExistForArrivalOrder) {
  with_local(Schedule::kArrival, kStraight, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    tables.check();
    for (const StepKind kind : {StepKind::kTrain, StepKind::kInfer, StepKind::kForward})
      EXPECT_EQ(tables.find(kind, 4), nullptr);
  });
}

TEST(Tables, AreMadeOncePerNumberOfMicroBatches) {
  with_local(Schedule::k1F1B, kStraight, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    const schedule::Table* four = tables.find(StepKind::kTrain, 4);
    const schedule::Table* three = tables.find(StepKind::kTrain, 3);
    EXPECT_NE(four, three);
    EXPECT_EQ(four, tables.find(StepKind::kTrain, 4));
    EXPECT_EQ(three->micro_batches, 3);
  });
}

// peer: other_pipelines MG forward_backward_func with
TEST(Tables, FallBackWhereMicroBatchesDoNotFillARoundOfInterleaving) {
  with_local(Schedule::kInterleaved, kLooped, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    EXPECT_EQ(tables.find(StepKind::kTrain, 5)->actions,
              schedule::one_forward_one_backward(local.plan.placement(5)).actions);
    EXPECT_EQ(tables.find(StepKind::kTrain, 1)->actions, schedule::interleaved({2, 1, 2}).actions);
  });
}

TEST(Tables, RejectInterleavingOfUnloopedStages) {
  for (const auto& owners :
       std::vector<std::vector<std::string>>{{"a", "b", "a"}, {"a", "a", "b", "b"}, {"a", "b", "b", "a"}}) {
    with_local(Schedule::kInterleaved, owners, 0, [](const LocalPipeline& local) {
      const Tables tables(local);
      try {
        tables.check();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), HasSubstr("Schedule::k1F1B, which takes any plan"));
      }
    });
  }
  with_local(Schedule::k1F1B, {"a", "b", "b", "a"}, 0, [](const LocalPipeline& local) {
    Tables tables(local);
    tables.check();
    schedule::validate(*tables.find(StepKind::kTrain, 3));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::tables_test
