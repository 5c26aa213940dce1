#include "launch/watch/diagnosis.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>

#include "core/api/step_part.h"

namespace torchspan::launch::diagnosis_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

WorkerReport worker(int rank) {
  WorkerReport report;
  report.rank = rank;
  report.name = "worker" + std::to_string(rank);
  report.process = 100 + rank;
  report.process_state = 'S';
  return report;
}

WorkerReport::Operation waits(std::uint64_t round) { return {"wait", "wait for reduction", 34, round}; }

TEST(Diagnosis, NamesAStoppedWorkerFirst) {  // hang_missing_rank
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  workers[0].open = workers[2].open = {waits(17)};
  workers[1].process_state = 'T';
  workers[1].answers = false;
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 2u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 1 (worker1, pid 101) is stopped"), HasSubstr("kill -CONT 101")));
  EXPECT_THAT(suspects[1], AllOf(HasSubstr("ranks 0,2 are in 'wait for reduction' number 17"),
                                 HasSubstr("rank 1 is not in it: it does not answer")));
}

TEST(Diagnosis, SaysWhatTheMissingRankDoes) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  workers[0].open = workers[1].open = {waits(5)};
  workers[2].open = {{"user", "augment", 40, 0}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0], HasSubstr("rank 2 is not in it: it has been in 'augment' for 40.0 s"));
}

TEST(Diagnosis, SaysThatNumbersDiffer) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"collective", "barrier", 9, 12, 77}};
  workers[1].open = {{"collective", "barrier", 8, 11, 77}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 0 is in 'barrier' number 12"),
                    HasSubstr("rank 1 is in 'barrier' number 11"), HasSubstr("the numbers differ")));
}

TEST(Diagnosis, SaysThatRanksCallDifferentOperations) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  const int group = group_number(std::vector<int>{0, 1});
  workers[0].open = {{"collective", "all_reduce", 9, 12, group}};
  workers[1].open = {{"collective", "barrier", 8, 12, group}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 0 is in 'all_reduce' number 12"),
                    HasSubstr("rank 1 is in 'barrier' number 12"), HasSubstr("different operations")));
}

TEST(Diagnosis, LooksOnlyAtTheRanksOfAGroupAndAtTheFirstOfSeveralOperationsInFlight) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2), worker(3)};
  const int group = group_number(std::vector<int>{0, 2});
  workers[0].open = {{"collective", "all_reduce", 9, 12, group}, {"collective", "all_reduce", 8, 13, group}};
  workers[2].ended = {{"collective", "all_reduce", 10, 11, group}};
  auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 0 is in 'all_reduce' number 12, for 9.0 s; rank 2 is not in it"),
                    HasSubstr("its last one of this group was 'all_reduce' number 11, 10.0 s ago"),
                    Not(HasSubstr("rank 1")), Not(HasSubstr("rank 3"))));
  workers[2].open = {{"collective", "all_reduce", 2, 12, group}};
  suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0], HasSubstr("all ranks are in it"));
}

TEST(Diagnosis, SaysWhatTheSenderOfAMessageDoes) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  const int group = group_number(std::vector<int>{0, 1, 2});
  workers[0].open = {{"message", "recv(Float [3] from rank 2, tag 1)", 5, 0, group, 2},
                     {"message", "recv(Float [4] from rank 1, tag 1)", 4, 0, group, 1}};
  workers[2].open = {{"user", "augment", 6, 0}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 0 has waited in 'recv(Float [3] from rank 2, tag 1)' for 5.0 s"),
                    HasSubstr("rank 2: it has been in 'augment' for 6.0 s"), Not(HasSubstr("rank 1:"))));
}

TEST(Diagnosis, SaysWhatAllRanksDoFromWhichAMessageMayCome) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2), worker(3)};
  const int group = group_number(std::vector<int>{0, 1, 2});
  workers[1].open = {{"message", "recv(Float [3] from any rank, tag 0)", 5, 0, group}};
  workers[0].open = {{"user", "augment", 6, 0}};
  workers[2].answers = false;
  const auto suspects = find_suspects(workers);
  ASSERT_FALSE(suspects.empty());
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 1 has waited in 'recv(Float [3] from any rank, tag 0)' for 5.0 s"),
                    HasSubstr("rank 0: it has been in 'augment' for 6.0 s"),
                    HasSubstr("rank 2: it does not answer"), Not(HasSubstr("rank 3"))));
}

TEST(Diagnosis, FindsCallsThatWaitForEachOther) {  // hang_cycle
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  workers[0].pending = {{"f", "worker1", "train.cpp:41", 12}, {"x", "worker0", "", 12}};
  workers[1].pending = {{"g", "worker2", "", 11}};
  workers[2].pending = {{"h", "worker0", "", 10}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0], AllOf(HasSubstr("rank 0 has waited for 'f' on worker1 at train.cpp:41 for 12.0 s"),
                                 HasSubstr("rank 1 has waited for 'g' on worker2"),
                                 HasSubstr("rank 2 has waited for 'h' on worker0")));
}

TEST(Diagnosis, BlamesTheBusyWorkerThatOthersWaitFor) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  workers[0].pending = {{"f", "worker2", "", 5}};
  workers[1].pending = {{"f", "worker2", "", 15}};
  workers[2].serving = {{"f", "worker1", "", 15, true}};
  auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 1 has waited for 'f' on rank 2 (worker2, pid 102) for 15.0 s"),
                    HasSubstr("it has run 'f' for worker1")));
  workers[2].serving.clear();
  suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0], HasSubstr("does not serve such a call"));
}

TEST(Diagnosis, NamesTheCallThatHoldsUpTheRankForWhichOthersWaitInABarrier) {
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  workers[0].pending = {{"train_client", "worker2", "", 5}};
  workers[2].serving = {{"train_client", "worker0", "", 5, true}};
  workers[1].open = workers[2].open = {{"wait", "barrier 'user.barrier'", 9, 1}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 2u);
  EXPECT_THAT(suspects[0], AllOf(HasSubstr("rank 0 has waited for 'train_client' on rank 2"),
                                 HasSubstr("it has run 'train_client' for worker0")));
  EXPECT_THAT(suspects[1], HasSubstr("ranks 1,2 are in 'barrier 'user.barrier'' number 1"));
}

TEST(Diagnosis, NamesTheHandlersThatHoldAllThreadsAndCountsEqualLines) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  for (int i = 0; i < 300; ++i) {
    workers[0].pending.push_back({"block", "worker1", "client.cpp:7", 12 - 0.01 * i});
    workers[0].open.push_back({"wait", "wait for a future", 12 - 0.01 * i, 0});
    workers[1].serving.push_back({"block", "worker0", "", 12 - 0.01 * i, i < 4});
  }
  workers[1].serving.insert(workers[1].serving.begin(), {"ping", "worker2", "", 0.1, true});
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 0 has waited for 'block' on rank 1 (worker1, pid 101) at client.cpp:7"),
                    HasSubstr("it has run 'block' for worker0 for 12.0 s"), Not(HasSubstr("ping")),
                    HasSubstr("296 more calls wait for a thread"), HasSubstr("WorkerOptions::max_threads")));
  const std::string page = format_diagnosis(workers);
  EXPECT_THAT(
      page,
      AllOf(HasSubstr("  wait          12.0 s  wait for a future  (300 times, the newest for 9.0 s)\n"),
            HasSubstr("  call          12.0 s  'block' to worker1 at client.cpp:7  (300 times, the newest"),
            HasSubstr("'block' from worker0  (4 times, the newest"),
            HasSubstr("(waits for a thread or an argument)  (296 times, the newest")));
  EXPECT_LT(std::count(page.begin(), page.end(), '\n'), 15);
}

TEST(Diagnosis, PrintsTheCommandThatShowsTheThreadsOfARankInItsOwnCode) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {waits(5)};  // rank 1 waits for a mutex of the program
  EXPECT_THAT(find_suspects(workers).at(0),
              AllOf(HasSubstr("rank 1 is not in it: it is in its own code"), HasSubstr("gdb -p 101 -batch")));
  workers[1].node = 1;
  EXPECT_THAT(find_suspects(workers).at(0), HasSubstr("its threads there: gdb -p 101"));
}

// Two groups of the same ranks, such as the program's and the one that a wrapper split from it.
TEST(Diagnosis, KeepsTheOperationsOfTwoGroupsOfTheSameRanksApart) {
  const std::vector<int> both{0, 1};
  const int first = group_number(both, 1), second = group_number(both, 2);
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"collective", "all_reduce", 9, 40, first}};
  workers[1].open = {{"collective", "barrier", 8, 3, second}};
  workers[1].ended = {{"collective", "all_reduce", 8.5, 39, first}};
  const auto suspects = find_suspects(workers);
  EXPECT_THAT(suspects, Each(Not(HasSubstr("numbers differ"))));
  EXPECT_THAT(suspects, Contains(AllOf(HasSubstr("'all_reduce' number 40"), HasSubstr("rank 1 is not in it"),
                                       HasSubstr("its last one of this group was 'all_reduce' number 39"))));
  EXPECT_THAT(suspects, Contains(AllOf(HasSubstr("'barrier' number 3"), HasSubstr("rank 0 is not in it"))));
}

TEST(Diagnosis, NamesTheCellThatAPipelineWaitsFor) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"pipeline", "wait for gradients of micro-batch 2 at layer 0", 12, 9}};
  workers[1].open = {{"pipeline", "1F2", 12.5, 9, 2}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("rank 1: it has been in '1F2' for 12.5 s"),
                    HasSubstr("rank 0 is in 'wait for gradients of micro-batch 2 at layer 0' of step 9")));
  workers[1].open[0].name = "wait for activations";
  EXPECT_THAT(find_suspects(workers).front(), HasSubstr("no worker runs an action"));
}

TEST(Diagnosis, NamesTheTensorsWithoutGradientOfABackwardPass) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"autograd", "backward", 12, 9}};
  workers[0].passes = {{9, false, {}}};
  workers[1].passes = {
      {8, false, {"of another pass"}},
      {9, false, {"the gradient of the result of 'f', sent to worker0 at train.cpp:3", "x"}}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("the backward pass of rank 0 has lasted 12.0 s"),
                    HasSubstr("rank 1 waits for the gradient of the result of 'f', sent to worker0 at "
                              "train.cpp:3 and 1 more"),
                    Not(HasSubstr("another pass"))));
}

TEST(Diagnosis, ShowsAWaitForAFutureOnlyIfNothingElseExplainsIt) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"wait", "wait for a future", 12, 0}};
  ASSERT_EQ(find_suspects(workers).size(), 1u);
  EXPECT_THAT(find_suspects(workers)[0], HasSubstr("rank 0 has waited for a future for 12.0 s"));
  EXPECT_THAT(format_diagnosis(workers), HasSubstr("  wait          12.0 s  wait for a future\n"));
  workers[1].open = {{"wait", "wait for a future", 12, 0}};
  EXPECT_EQ(find_suspects(workers).size(), 2u) << "no operation of all ranks";
  workers[0].pending = {{"f", "worker1", "train.cpp:3", 12}};
  ASSERT_EQ(find_suspects(workers).size(), 1u);
  EXPECT_THAT(find_suspects(workers)[0], AllOf(HasSubstr("'f' on rank 1"), HasSubstr("train.cpp:3")));
}

TEST(Diagnosis, NamesWhatAMissingRankDoesBesidesItsWaitForAFuture) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].open = {{"collective", "barrier", 12, 3}};
  workers[1].open = {{"user", "augment", 13, 0}, {"wait", "wait for a future", 12, 0}};
  EXPECT_THAT(find_suspects(workers).at(0),
              HasSubstr("rank 1 is not in it: it has been in 'augment' for 13.0 s"));
  workers[1].open.erase(workers[1].open.begin());
  EXPECT_THAT(find_suspects(workers).at(0),
              HasSubstr("rank 1 is not in it: it has waited for a future for 12.0 s"));
}

TEST(Diagnosis, ComparesOperationsOnDevicesAndNotTheirAnnouncements) {
  const int group = group_number(std::vector<int>{0, 1, 2});
  std::vector<WorkerReport> workers = {worker(0), worker(1), worker(2)};
  for (WorkerReport& one : workers) one.world = 3;
  workers[0].open = {{"wait", "all_reduce(Float [4], sum)", 3, 7, group},
                     {"wait", "all_gather(Byte [104])", 2.9, 5, group}};
  workers[2].open = {{"wait", "all_gather(Byte [104])", 2.8, 5, group},
                     {"wait", "all_reduce(Float [4], sum)", 2.7, 7, group}};
  const auto suspects = find_suspects(workers);
  ASSERT_EQ(suspects.size(), 1u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("ranks 0,2 are in 'all_reduce(Float [4], sum)' number 7"),
                    HasSubstr("rank 1 is not in it"), Not(HasSubstr("Byte")), Not(HasSubstr("differ"))));
}

TEST(Diagnosis, IgnoresShortWaits) {
  std::vector<WorkerReport> workers = {worker(0), worker(1)};
  workers[0].pending = {{"f", "worker1", "", 0.5}};
  workers[1].pending = {{"f", "worker0", "", 0.9}};
  workers[0].open = {{"wait", "wait for reduction", 0.3, 1}};
  EXPECT_THAT(find_suspects(workers), IsEmpty());
  EXPECT_THAT(format_diagnosis(workers), HasSubstr("not stuck"));
}

TEST(WorkerReport, HasNoControlCharacters) {  // names come from programs, and are shown on terminals
  const auto report =
      decode_worker_report(R"({"rank":3,"worker":"w\u001b[31m","open":[{"kind":"user","name":"a\nb\u007f"}],)"
                           R"("calls":{"passes":[{"id":1,"waits":["x\ty"]}]}})");
  EXPECT_EQ(report.name, "w [31m");
  EXPECT_EQ(report.open.at(0).name, "a b ");
  EXPECT_EQ(report.passes.at(0).waits.at(0), "x y");
}

TEST(WorkerReport, SkipsWhatItDoesNotKnow) {
  const auto report = decode_worker_report(
      R"({"rank":3,"worker":"w","new":[1],"open":[{"kind":"wait","name":7},5],"calls":{"pending":[{"call":"f","to":"w1","seconds":2}]}})");
  EXPECT_EQ(report.rank, 3);
  ASSERT_EQ(report.open.size(), 1u);
  EXPECT_EQ(report.open[0].name, "");
  ASSERT_EQ(report.pending.size(), 1u);
  EXPECT_EQ(report.pending[0].peer, "w1");
  for (const char* text : {"", "[]", "{", "null", "{}"})
    EXPECT_THROW(decode_worker_report(text), Error) << text;
}

}  // namespace
}  // namespace torchspan::launch::diagnosis_test
