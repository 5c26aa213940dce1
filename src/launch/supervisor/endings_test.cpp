#include "launch/supervisor/endings.h"

#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::launch::endings_test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Ending ending(int rank, int code, int signal, Duration after, bool asked = false) {
  return {rank, "worker" + std::to_string(rank), 100 + rank, code, signal, asked, after};
}

TEST(Endings, OfAJobThatSucceededGiveZero) {
  const std::vector<Ending> endings = {ending(0, 0, 0, milliseconds(1)), ending(1, 0, 0, milliseconds(2))};
  EXPECT_FALSE(first_failure(endings));
  EXPECT_EQ(exit_code(endings, {}), 0);
  EXPECT_EQ(summarize(endings, {}, {}), "");
}

TEST(Endings, FirstFailureGivesTheExitCode) {
  EXPECT_EQ(exit_code({ending(1, 0, 0, milliseconds(1)), ending(0, 7, 0, milliseconds(2)),
                       ending(2, 9, 0, milliseconds(3))},
                      {}),
            7);
  EXPECT_EQ(exit_code({ending(0, 0, SIGSEGV, milliseconds(2))}, {}), 128 + SIGSEGV);
}

TEST(Endings, InterruptionGivesTheExitCodeBeforeAnyFailure) {
  EXPECT_EQ(exit_code({ending(0, 7, 0, milliseconds(2))}, {SIGINT}), 130);
  EXPECT_EQ(exit_code({ending(0, 0, 0, milliseconds(2))}, {SIGTERM}), 143);
}

TEST(Endings, WorkersThatTheLauncherStoppedAreNoFailures) {
  const std::vector<Ending> endings = {ending(0, 0, SIGTERM, milliseconds(1), true),
                                       ending(1, 3, 0, milliseconds(2))};
  EXPECT_EQ(first_failure(endings), 1u);
}

TEST(Endings, ACrashPrecedesTheExitCodesItCaused) {
  EXPECT_EQ(first_failure({ending(0, 1, 0, milliseconds(100)), ending(1, 0, SIGABRT, milliseconds(110)),
                           ending(2, 0, SIGKILL, milliseconds(120))}),
            2u);
  EXPECT_EQ(first_failure({ending(0, 1, 0, milliseconds(100)), ending(2, 0, SIGKILL, milliseconds(151))}),
            0u);
  EXPECT_EQ(first_failure({ending(0, 3, 0, milliseconds(100)), ending(1, 0, SIGABRT, milliseconds(101))}),
            0u);
  EXPECT_EQ(
      first_failure({ending(0, 0, SIGSEGV, milliseconds(100)), ending(1, 0, SIGKILL, milliseconds(101))}),
      0u);
}

TEST(Endings, AFailedWorkerPrecedesThoseThatBlameIt) {
  std::vector<Ending> endings = {ending(2, 1, 0, milliseconds(100)), ending(1, 1, 0, milliseconds(110)),
                                 ending(0, 9, 0, milliseconds(400), true)};
  endings[0].blames = endings[1].blames = endings[2].process();
  EXPECT_EQ(first_failure(endings), 2u);
  EXPECT_EQ(exit_code(endings, {}), 9);
  endings[2].signal = SIGTERM;  // the launcher's, to a worker that was still running
  endings[2].code = 0;
  EXPECT_EQ(first_failure(endings), 0u);
  EXPECT_EQ(exit_code(endings, {}), 1);
  endings[2].signal = SIGSEGV;  // not from the launcher
  EXPECT_EQ(first_failure(endings), 2u);
  endings[2].signal = 0;  // it ended without an error: a worker that blames it is wrong
  EXPECT_EQ(first_failure(endings), 0u);
  endings[2].code = 9;
  endings[2].blames = endings[0].process();  // a cycle of blames must end
  EXPECT_TRUE(first_failure(endings));
}

TEST(Endings, BlameIsReadFromTheOutputOfWorkers) {
  EXPECT_EQ(blamed_process({"hello",
                            "torchspan[worker2] warning: worker0 (rank 0, pid 5783 on vm) died: its "
                            "process ended without a goodbye; see its own output for why"}),
            (RankProcess{0, 5783}));
  EXPECT_EQ(blamed_process({"worker0 (rank 0, pid 5783 on vm) is well", ""}), RankProcess());
  EXPECT_EQ(
      blamed_process({"worker2 (rank 2, pid 7 on vm) left because worker1 (rank 1, pid 6 on vm) died: x"}),
      (RankProcess{1, 6}));
  EXPECT_EQ(blamed_process({"worker2 (rank 2, pid 7 on vm) left because its shutdown() failed: no"}),
            (RankProcess{2, 7}));
  EXPECT_EQ(blamed_process({"worker1 (rank 1, pid 6 on vm) left without shutdown(); see"}),
            (RankProcess{1, 6}));
  EXPECT_EQ(blamed_process({"worker1 (rank 1, pid 6 on vm) left the world"}), RankProcess());
  EXPECT_EQ(blamed_process({"a (rank 1, pid 99999999999999999999 on vm) died: x"}), RankProcess())
      << "no such pid";
}

TEST(Endings, AWorkerWithoutShutdownPrecedesThoseThatBlameIt) {
  std::vector<Ending> endings = {ending(1, 0, 0, milliseconds(100)), ending(0, 5, 0, milliseconds(110))};
  endings[1].blames = endings[0].process();
  EXPECT_EQ(first_failure(endings), 0u);
  EXPECT_EQ(exit_code(endings, {}), 5);
  EXPECT_THAT(
      summarize(endings, {}, {}),
      AllOf(HasSubstr("first failure: worker1 (rank 1, pid 101) exited with code 0 without shutdown(), "),
            HasSubstr("the others: worker0: failed because of it (exited with code 5)\n"),
            HasSubstr("exit code: 5\n")));
  endings[0].asked = true;  // the launcher had asked it to end
  EXPECT_EQ(first_failure(endings), 1u);
}

Ending replaced(Ending ending, int incarnation) {
  ending.replaced = true;
  ending.incarnation = incarnation;
  return ending;
}

TEST(Endings, OfReplacedWorkersAreFailuresOnlyAsCauses) {
  std::vector<Ending> endings = {replaced(ending(1, 3, 0, milliseconds(100)), 0),
                                 ending(1, 0, 0, milliseconds(200)), ending(0, 0, 0, milliseconds(210))};
  endings[1].incarnation = 1;
  endings[1].pid = 77;
  EXPECT_FALSE(first_failure(endings));
  EXPECT_EQ(exit_code(endings, {}), 0);
  EXPECT_EQ(exit_code(endings, {.signal = SIGTERM, .preemption = true, .clean_code = 85}), 85);
  endings[2].code = 9;
  EXPECT_EQ(first_failure(endings), 2u);
  EXPECT_EQ(exit_code(endings, {}), 9);
  endings[2].blames = {1, 101};  // rank 0 failed because the replaced worker had died
  EXPECT_EQ(first_failure(endings), 0u);
  EXPECT_EQ(exit_code(endings, {}), 3);
  EXPECT_THAT(summarize(endings, {}, {}),
              AllOf(HasSubstr("first failure: worker1 (rank 1, pid 101) exited with code 3"),
                    HasSubstr("worker0: failed because of it")));
  endings[2].after = endings[0].after + kCauseTime + milliseconds(1);
  EXPECT_EQ(first_failure(endings), 2u) << "the job has survived the death";
  EXPECT_EQ(exit_code(endings, {}), 9);
}

TEST(Endings, AProcessOfAnotherHostMayHaveTheSamePid) {
  std::vector<Ending> endings = {ending(6, 0, SIGTERM, milliseconds(300), true),
                                 ending(0, 5, 0, milliseconds(110))};
  endings[0].pid = 22;
  endings[1].blames = {2, 22};  // rank 2 is on another host
  EXPECT_EQ(first_failure(endings), 1u);
  endings[0].code = 1, endings[0].signal = 0;
  EXPECT_EQ(first_failure(endings), 1u) << "it failed after the launcher had stopped the job";
}

TEST(Endings, OfReplacedWorkersAreCountedByRank) {
  EXPECT_EQ(describe_replacements({ending(0, 3, 0, milliseconds(1))}), "");
  std::vector<Ending> endings = {replaced(ending(2, 3, 0, milliseconds(1000)), 0),
                                 replaced(ending(1, 4, 0, milliseconds(1500)), 0),
                                 replaced(ending(2, 0, SIGSEGV, milliseconds(2000)), 1),
                                 replaced(ending(3, 5, 0, milliseconds(2500)), 0)};
  Ending last = ending(2, 0, 0, milliseconds(9000));
  last.incarnation = 2;
  endings.push_back(last);
  last.rank = 1;
  last.incarnation = 1;
  endings.push_back(last);
  EXPECT_EQ(
      describe_replacements(endings),
      "  worker1 (rank 1) was replaced once; last failure: pid 101 exited with code 4, 1.5 s after the "
      "start\n"
      "  worker2 (rank 2) was replaced 2 times; last failure: pid 102 was killed by SIGSEGV (a bad memory "
      "access), 2.0 s after the start\n"
      "  worker3 (rank 3) was not replaced; last failure: pid 103 exited with code 5, 2.5 s after the "
      "start\n");
}

TEST(Endings, SummaryContainsEveryPart) {
  const std::vector<Ending> endings = {
      ending(1, 3, 0, milliseconds(1500)), ending(0, 1, 0, milliseconds(1510)),
      ending(2, 0, SIGTERM, milliseconds(1600), true), ending(3, 0, SIGTERM, milliseconds(1600), true)};
  const std::string text = summarize(endings, {"Oops: x", {"Traceback", "boom"}}, {});
  EXPECT_THAT(
      text,
      HasSubstr("first failure: worker1 (rank 1, pid 101) exited with code 3, 1.5 s after the start\n"));
  EXPECT_THAT(text, HasSubstr("  its error: Oops: x\n  its last lines:\n    Traceback\n    boom\n"));
  EXPECT_THAT(text,
              HasSubstr("worker0: exited with code 1; worker2, worker3: stopped (was killed by SIGTERM)\n"));
  EXPECT_THAT(text, HasSubstr("exit code: 3\n"));
}

TEST(Endings, SummaryContainsAnErrorThatTheWorkerPrintedOnce) {
  const std::vector<Ending> endings = {ending(0, 1, 0, milliseconds(1500))};
  const std::string both = summarize(endings, {"Oops: x", {"before", "error: Oops: x"}}, {});
  EXPECT_THAT(both, HasSubstr("  its error: Oops: x\n  its last lines:\n    before\n  exit code: 1\n"));
  const std::string only = summarize(endings, {"Oops: x", {"error: Oops: x"}}, {});
  EXPECT_THAT(only, HasSubstr("  its error: Oops: x\n  exit code: 1\n"));
}

TEST(Endings, SummarySeparatesAFailureFromItsConsequences) {
  std::vector<Ending> endings = {ending(0, 0, SIGABRT, milliseconds(100)),
                                 ending(1, 0, SIGABRT, milliseconds(101)),
                                 ending(2, 4, 0, milliseconds(102))};
  endings[1].blames = endings[0].process();
  EXPECT_THAT(
      summarize(endings, {}, {}),
      AllOf(HasSubstr("first failure: worker0 (rank 0, pid 100) was killed by SIGABRT"),
            HasSubstr("worker1: failed because of it (was killed by SIGABRT (an uncaught exception or a "
                      "failed check)); worker2: exited with code 4\n")));
}

TEST(Endings, SummaryOfAnInterruptionBlamesNoWorker) {
  const std::string text = summarize({ending(0, 0, SIGINT, milliseconds(5), true)}, {}, {SIGINT});
  EXPECT_THAT(text, AllOf(HasSubstr("interrupted by SIGINT"), HasSubstr("exit code: 130"),
                          Not(HasSubstr("first failure"))));
}

TEST(Endings, CleanEndAfterAPreemptionGivesTheRequeueCode) {
  const std::vector<Ending> clean = {ending(0, 0, 0, milliseconds(5)), ending(1, 0, 0, milliseconds(6))};
  const Interruption preemption{.signal = SIGUSR1, .preemption = true, .clean_code = 85};
  EXPECT_EQ(exit_code(clean, preemption), 85);
  EXPECT_THAT(
      summarize(clean, {}, preemption),
      AllOf(HasSubstr("preempted by SIGUSR1, and all workers ended with code 0"), HasSubstr(": 85\n")));
  EXPECT_EQ(exit_code(clean, {.signal = SIGTERM, .preemption = true}), 0);
  EXPECT_EQ(exit_code(clean, {.signal = SIGINT, .clean_code = 85}), 130);
  const std::vector<Ending> unclean = {ending(0, 0, 0, milliseconds(5)),
                                       ending(1, 0, SIGUSR1, milliseconds(6), true)};
  EXPECT_EQ(exit_code(unclean, preemption), 128 + SIGUSR1);
  EXPECT_THAT(summarize(unclean, {}, preemption),
              AllOf(HasSubstr("the job was preempted by SIGUSR1\n"), HasSubstr("does not handle it")));
}

TEST(Endings, AKillByTheSystemIsPointedOut) {
  EXPECT_THAT(describe(ending(0, 0, SIGKILL, milliseconds(1))),
              AllOf(HasSubstr("SIGKILL"), HasSubstr("dmesg")));
  EXPECT_THAT(describe(ending(0, 0, SIGKILL, milliseconds(1), true)), Not(HasSubstr("dmesg")));
  EXPECT_THAT(summarize({ending(0, 0, SIGKILL, milliseconds(1))}, {}, {}), HasSubstr("wrote nothing"));
}

TEST(Endings, NameSignals) {
  EXPECT_EQ(signal_name(SIGKILL), "SIGKILL");
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(99), "signal 99");
}

}  // namespace
}  // namespace torchspan::launch::endings_test
