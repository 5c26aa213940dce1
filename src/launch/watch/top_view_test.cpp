#include "launch/watch/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::launch::top_view_test {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<WorkerReport> two_workers() {
  std::vector<WorkerReport> workers(2);
  for (int rank : {0, 1}) {
    WorkerReport& worker = workers[static_cast<std::size_t>(rank)];
    worker.rank = rank;
    worker.name = "worker" + std::to_string(rank);
    worker.process = 100 + rank;
    worker.process_state = 'S';
  }
  return workers;
}

TEST(TopView, ShowsRatesBetweenTwoReports) {
  auto workers = two_workers();
  workers[0].processor_seconds = 10;
  workers[0].calls_sent = 1000;
  TopView view;
  EXPECT_THAT(view.show(workers, seconds(1)), ContainsRegex("   0  worker0 +100 +S +- "));
  workers[0].processor_seconds = 11;
  workers[0].calls_sent = 1500;
  workers[0].pending = {{"f", "worker1", "", 3}, {"g", "worker1", "", 1}};
  workers[1].serving = {{"f", "worker0", "", 3}};
  workers[1].queued = 5;
  workers[1].references = 7;
  const std::string text = view.show(workers, seconds(2));
  EXPECT_THAT(text, ContainsRegex("   0  worker0 +100 +S +50 % .* 250 +2 +0 +0 +0  'f' on worker1  3.0 s\n"));
  EXPECT_THAT(text, ContainsRegex("   1  worker1 +101 .* 0 +1 +5 +7  serves 'f' for worker0  3.0 s\n"));
  EXPECT_THAT(text, Not(HasSubstr("host")));
}

TEST(TopView, ShowsWhatAWorkerDoesInsideTheSpansOfTheProgram) {
  auto workers = two_workers();
  workers[0].open = {{"user", "step", 9, 0}, {"wait", "wait for reduction", 3, 7}};
  workers[1].open = {{"user", "step", 9, 0}, {"user", "augment", 8, 0}};
  const std::string text = TopView().show(workers, seconds(1));
  EXPECT_THAT(text, AllOf(HasSubstr("  wait for reduction  3.0 s\n"), HasSubstr("  augment  8.0 s\n"),
                          Not(HasSubstr("step"))));
  workers[0].open.pop_back();
  EXPECT_THAT(TopView().show(workers, seconds(1)), HasSubstr("  step  9.0 s\n"));
}

TEST(TopView, ShowsTheLargestFlowsOfBytes) {
  auto workers = two_workers();
  EXPECT_THAT(TopView().show(workers, seconds(1)), Not(HasSubstr("bytes of calls")));
  workers[0].received = {{0, 5000}, {1, 100}};
  workers[1].received = {{0, 3000}};
  EXPECT_THAT(TopView().show(workers, seconds(1)), HasSubstr("bytes of calls and replies: 0→1 "));
  EXPECT_THAT(TopView().show(workers, seconds(1)), AllOf(HasSubstr("/s, 1→0 "), Not(HasSubstr("0→0"))));
}

TEST(TopView, NamesTheHostsOfAJobOnSeveral) {
  auto workers = two_workers();
  for (WorkerReport& worker : workers) worker.node = worker.rank;
  workers[0].host = "near";
  workers[1].answers = false;
  workers[1].process = 0;
  workers[1].process_state = '?';
  workers[1].trouble = "its launcher has ended";
  const std::string text = TopView().show(workers, seconds(1));
  EXPECT_THAT(text, ContainsRegex("rank  host +worker"));
  EXPECT_THAT(text, ContainsRegex("   0  host 0 \\(near\\) +worker0"));
  EXPECT_THAT(text, ContainsRegex("   1  host 1 +worker1 +- +- .*  its launcher has ended\n"));
}

}  // namespace
}  // namespace torchspan::launch::top_view_test
