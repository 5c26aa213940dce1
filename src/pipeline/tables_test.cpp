#include "pipeline/tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::tables_test {
namespace {

using ::testing::HasSubstr;

/// Layers one after the other, a stage each, on the workers of `owners`.
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

void with_station(Schedule schedule, const std::vector<std::string>& owners, int most_in_flight,
                  const std::function<void(const Station&)>& body) {
  torchspan::testing::on_workers(1, 1, [&](Worker& worker) {
    PipelineOptions options;
    options.schedule = schedule;
    options.most_in_flight = most_in_flight;
    Station station{worker, options, plan_on(owners)};
    body(station);
  });
}

const std::vector<std::string> kStraight{"a", "b", "c"};
const std::vector<std::string> kLooped{"a", "b", "a", "b"};

TEST(Tables, AreThoseOfTheSchedule) {
  with_station(Schedule::kGPipe, kStraight, 0, [](const Station& station) {
    Tables tables(station);
    tables.check();
    EXPECT_EQ(tables.find(StepKind::kTrain, 4)->tasks, schedule::gpipe(station.plan.placement(4)).tasks);
  });
  with_station(Schedule::kOneFOneB, kStraight, 2, [](const Station& station) {
    Tables tables(station);
    EXPECT_EQ(tables.find(StepKind::kTrain, 6)->tasks,
              schedule::one_forward_one_backward(station.plan.placement(6), 2).tasks);
    EXPECT_NE(tables.find(StepKind::kTrain, 6)->tasks,
              schedule::one_forward_one_backward(station.plan.placement(6)).tasks)
        << "most_in_flight must matter";
  });
  with_station(Schedule::kInterleaved, kLooped, 0, [](const Station& station) {
    Tables tables(station);
    tables.check();
    EXPECT_EQ(tables.find(StepKind::kTrain, 4)->tasks, schedule::interleaved({2, 4, 2}).tasks);
  });
}

TEST(Tables, OfStepsWithoutBackwardsHaveForwardsOnly) {
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::kOneFOneB, Schedule::kInterleaved}) {
    with_station(schedule, kLooped, 0, [](const Station& station) {
      Tables tables(station);
      for (const StepKind kind : {StepKind::kInfer, StepKind::kLoss}) {
        EXPECT_EQ(tables.find(kind, 5)->tasks, schedule::forward_only(station.plan.placement(5)).tasks);
      }
    });
  }
}

TEST(Tables, OfForwardsWhoseBackwardsComeLaterHaveAllForwardsFirst) {
  with_station(Schedule::kOneFOneB, kStraight, 1, [](const Station& station) {
    Tables tables(station);
    EXPECT_EQ(tables.find(StepKind::kForward, 4)->tasks, schedule::gpipe(station.plan.placement(4)).tasks);
  });
}

TEST(Tables, AreNoneWhereTheOrderOfArrivalDecides) {
  with_station(Schedule::kArrival, kStraight, 0, [](const Station& station) {
    Tables tables(station);
    tables.check();
    for (const StepKind kind : {StepKind::kTrain, StepKind::kInfer, StepKind::kForward})
      EXPECT_EQ(tables.find(kind, 4), nullptr);
  });
}

TEST(Tables, AreMadeOncePerNumberOfMicroBatches) {
  with_station(Schedule::kOneFOneB, kStraight, 0, [](const Station& station) {
    Tables tables(station);
    const schedule::Table* four = tables.find(StepKind::kTrain, 4);
    const schedule::Table* three = tables.find(StepKind::kTrain, 3);
    EXPECT_NE(four, three);
    EXPECT_EQ(four, tables.find(StepKind::kTrain, 4));
    EXPECT_EQ(three->micro_batches, 3);
  });
}

TEST(Tables, FallBackWhereMicroBatchesDoNotFillARoundOfInterleaving) {
  with_station(Schedule::kInterleaved, kLooped, 0, [](const Station& station) {
    Tables tables(station);
    EXPECT_EQ(tables.find(StepKind::kTrain, 5)->tasks,
              schedule::one_forward_one_backward(station.plan.placement(5)).tasks);
    EXPECT_EQ(tables.find(StepKind::kTrain, 1)->tasks, schedule::interleaved({2, 1, 2}).tasks);
  });
}

TEST(Tables, RefuseToInterleaveWhatIsNotLooped) {
  for (const auto& owners :
       std::vector<std::vector<std::string>>{{"a", "b", "a"}, {"a", "a", "b", "b"}, {"a", "b", "b", "a"}}) {
    with_station(Schedule::kInterleaved, owners, 0, [](const Station& station) {
      const Tables tables(station);
      try {
        tables.check();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
        EXPECT_THAT(error.what(), HasSubstr("Schedule::kOneFOneB takes any plan"));
      }
    });
  }
  with_station(Schedule::kOneFOneB, {"a", "b", "b", "a"}, 0, [](const Station& station) {
    Tables tables(station);
    tables.check();
    schedule::validate(*tables.find(StepKind::kTrain, 3));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::tables_test
