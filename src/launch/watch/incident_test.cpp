#include "launch/watch/incident.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/api/group_number.h"

namespace torchspan::launch::incident_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<WorkerReport> workers(int world) {
  std::vector<WorkerReport> all(static_cast<std::size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    WorkerReport& worker = all[static_cast<std::size_t>(rank)];
    worker.rank = rank;
    worker.name = "worker" + std::to_string(rank);
    worker.process_state = 'S';
  }
  return all;
}

TEST(Incident, NamesTheRankThatWasMissingInACollectiveThatHasEnded) {
  auto all = workers(3);
  all[1].open = {{"user", "augment", 31, 0}};
  const int group = group_number(std::vector<int>{0, 1, 2});
  Incident incident;
  for (const int rank : {2, 0}) {
    incident.notices.emplace_back(
        rank,
        TimeoutNotice{.kind = "collective", .name = "all_reduce", .seconds = 30, .id = 17, .part = group});
  }
  const std::string page = describe_incident(incident, "worker", all);
  EXPECT_THAT(page, StartsWith("rank 2: 'all_reduce' number 17 timed out after 30.0 s\n"));
  EXPECT_THAT(incident.suspect, AllOf(HasSubstr("ranks 0,2 are in 'all_reduce' number 17"),
                                      HasSubstr("rank 1 is not in it: it has been in 'augment'")));
  EXPECT_THAT(page, HasSubstr("1. " + incident.suspect));
}

TEST(Incident, ListsRanksThatCouldNotBeAsked) {
  auto all = workers(3);
  all.erase(all.begin());
  Incident incident;
  incident.notices.emplace_back(2, TimeoutNotice{.kind = "wait", .name = "barrier", .seconds = 3});
  const std::string page = describe_incident(incident, "worker", all, {0, 1, 2});
  EXPECT_THAT(page, HasSubstr("rank 0  worker0\n  no process to ask"));
  EXPECT_THAT(page, ::testing::Not(HasSubstr("rank 1  worker1\n  no process")));
}

TEST(Incident, ShowsCallsThatWaitedForEachOther) {
  auto all = workers(2);
  all[1].pending = {{"g", "worker0", "", 6}};
  Incident incident;
  incident.notices.emplace_back(
      0, TimeoutNotice{.kind = "call", .name = "f", .peer = "worker1", .site = "train.cpp:41", .seconds = 5});
  describe_incident(incident, "worker", all);
  EXPECT_EQ(incident.headline(), "rank 0: the call 'f' to worker1 at train.cpp:41 timed out after 5.0 s");
  EXPECT_THAT(incident.suspect,
              AllOf(HasSubstr("wait for each other"), HasSubstr("'f' on worker1 at train.cpp:41")));
}

TEST(Incident, ListsAnOperationOnceIfItsWorkerStillHasIt) {
  auto all = workers(2);
  all[0].open = {{"pipeline", "wait for activations", 4, 9}};
  Incident incident;
  incident.notices.emplace_back(
      0, TimeoutNotice{.kind = "pipeline", .name = "step", .detail = "activations", .seconds = 4, .id = 9});
  add_timed_out(incident, "worker", all);
  EXPECT_EQ(all[0].open.size(), 1u);
  EXPECT_THAT(incident.headline(), HasSubstr("; it waited for activations"));
}

TEST(Incident, DoesNotBlameAWorkerThatEndedBecauseOfItsTimeOut) {
  auto all = workers(3);
  all[0].process_state = 'X';
  all[0].answers = false;
  all.pop_back();
  Incident incident;
  for (const int rank : {0, 2}) {
    incident.notices.emplace_back(
        rank, TimeoutNotice{.kind = "collective", .name = "barrier", .seconds = 4, .id = 9});
  }
  describe_incident(incident, "worker", all);
  EXPECT_THAT(incident.suspect,
              AllOf(HasSubstr("ranks 0,2 are in 'barrier' number 9"), HasSubstr("rank 1 is not in it")));
}

}  // namespace
}  // namespace torchspan::launch::incident_test
