#include "launch/watch/incident.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/api/step_part.h"

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

/// Rank 1 reports that a call to rank 0 timed out, which its handler of worker0's call made.
Incident time_out_in_a_handler() {
  Incident incident;
  incident.notices.emplace_back(
      1, TimeoutNotice{.kind = "call", .name = "g", .peer = "worker0", .site = "train.cpp:7", .seconds = 5});
  incident.notices.emplace_back(
      1, TimeoutNotice{.kind = "handler", .name = "f", .peer = "worker0", .seconds = 6});
  return incident;
}

TEST(Incident, ShowsTheCallInWhoseHandlerACallTimedOutThoughBothHaveEnded) {
  auto all = workers(2);
  Incident incident = time_out_in_a_handler();
  const std::string page = describe_incident(incident, "worker", all);
  EXPECT_EQ(incident.headline(), "rank 1: the call 'g' to worker0 at train.cpp:7 timed out after 5.0 s");
  EXPECT_THAT(
      page,
      HasSubstr("\nrank 1: a call timed out that the handler of 'f' made, 6.0 s after worker0 called it\n"));
  EXPECT_THAT(incident.suspect, AllOf(HasSubstr("wait for each other"),
                                      HasSubstr("rank 0 has waited for 'f' on worker1 for 6.0 s"),
                                      HasSubstr("rank 1 has waited for 'g' on worker0 at train.cpp:7")));
  EXPECT_THAT(page, HasSubstr("'f' from worker0"));
}

TEST(Incident, ShowsTheCallOfACallerThatHasEnded) {
  for (const bool has_report : {true, false}) {
    SCOPED_TRACE(has_report);
    auto all = workers(2);
    all[0].process_state = 'X';
    all[0].answers = false;
    if (!has_report) all.erase(all.begin());
    Incident incident = time_out_in_a_handler();
    const std::string page = describe_incident(incident, "worker", all, {0, 1});
    EXPECT_THAT(incident.suspect, HasSubstr("rank 0 has waited for 'f' on worker1"));
    EXPECT_THAT(page, ::testing::Not(HasSubstr("has died")));
  }
}

TEST(Incident, KeepsACallerThatDoesNotAnswerAsTheSuspect) {
  auto all = workers(2);
  all[0].process = 100;
  all[0].process_state = 'T';
  all[0].answers = false;
  Incident incident = time_out_in_a_handler();
  describe_incident(incident, "worker", all);
  EXPECT_THAT(incident.suspect, HasSubstr("is stopped by a signal"));
}

TEST(Incident, ListsTheCallOfAHandlerOnceIfItsWorkersStillHaveIt) {
  auto all = workers(2);
  all[0].pending = {{"f", "worker1", "train.cpp:41", 6}};
  all[1].serving = {{"f", "worker0", "", 6, true}};
  Incident incident = time_out_in_a_handler();
  add_timed_out(incident, "worker", all);
  EXPECT_EQ(all[0].pending.size(), 1u);
  EXPECT_EQ(all[1].serving.size(), 1u);
}

TEST(Incident, LeavesOutACallerWhoseRankIsUnknown) {
  auto all = workers(2);
  Incident incident = time_out_in_a_handler();
  for (const char* name : {"trainer", "worker", "worker-1", "worker1x"}) {
    incident.notices[1].second.peer = name;
    auto changed = all;
    add_timed_out(incident, "worker", changed);
    EXPECT_EQ(changed.size(), 2u) << name;
    EXPECT_EQ(changed[1].serving.size(), 1u) << name;
  }
}

TEST(Incident, PrefersCallsThatWaitForEachOtherToAWorkerThatDoesNotAnswerAnyMore) {
  auto all = workers(2);
  all[1].answers = false;
  all[1].process_state = 'R';
  all[1].pending = {{"g", "worker0", "", 6}};
  Incident incident;
  incident.notices.emplace_back(
      0, TimeoutNotice{.kind = "call", .name = "f", .peer = "worker1", .site = "train.cpp:41", .seconds = 5});
  describe_incident(incident, "worker", all);
  EXPECT_THAT(incident.suspect, HasSubstr("wait for each other"));
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
