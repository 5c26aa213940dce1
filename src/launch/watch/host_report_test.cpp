#include "launch/watch/host_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include "core/api/step_part.h"
#include "launch/watch/diagnosis.h"

namespace torchspan::launch::host_report_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

WorkerReport make_worker(int rank) {
  WorkerReport worker;
  worker.rank = rank;
  worker.world = 4;
  worker.name = "worker" + std::to_string(rank);
  worker.process = 100 + rank;
  worker.process_state = 'S';
  return worker;
}

HostReport make_host(int node, std::vector<WorkerReport> workers) {
  return {.node = node, .host = "far", .trouble = "", .workers = std::move(workers)};
}

TEST(HostReport, SurvivesItsEncoding) {
  WorkerReport worker = make_worker(3);
  worker.process_state = 'T';
  worker.answers = false;
  worker.seconds = 12.5;
  worker.processor_seconds = 3.25;
  worker.resident_bytes = std::numeric_limits<std::uint64_t>::max();
  worker.calls_sent = 9;
  worker.queued = 4;
  worker.references = 6;
  worker.received = {{0, 1000}, {2, 5}};
  worker.open = {{"collective", "all_reduce", 3.5, 17, 123456}};
  worker.ended = {{"collective", "barrier", 4.5, 16, 123456}};
  worker.pending = {{"f", "worker0", "train.cpp:3", 2.5, true}};
  worker.serving = {{"g", "worker1", "", 1.5, false}};
  worker.passes = {{7, true, {"a tensor", "another"}}};
  worker.threads = {{'R', 1}, {'S', 3}};
  HostReport sent = make_host(1, {make_worker(2), worker});
  sent.notices.emplace_back(2, TimeoutNotice{.kind = "call", .name = "f", .peer = "worker0", .seconds = 5});
  sent.page = "pages/1";
  sent.written = true;
  const auto got = decode_host_report(encode_host_report(sent));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->node, 1);
  EXPECT_EQ(got->host, "far");
  EXPECT_EQ(got->page, "pages/1");
  EXPECT_TRUE(got->written);
  ASSERT_EQ(got->notices.size(), 1u);
  EXPECT_EQ(got->notices[0].first, 2);
  EXPECT_EQ(got->notices[0].second.peer, "worker0");
  ASSERT_EQ(got->workers.size(), 2u);
  const WorkerReport& there = got->workers[1];
  EXPECT_EQ(there.rank, 3);
  EXPECT_EQ(there.process, 103);
  EXPECT_EQ(there.process_state, 'T');
  EXPECT_FALSE(there.answers);
  EXPECT_EQ(there.seconds, 12.5);
  EXPECT_EQ(there.processor_seconds, 3.25);
  EXPECT_EQ(there.resident_bytes, worker.resident_bytes);
  EXPECT_EQ(there.calls_sent, 9u);
  EXPECT_EQ(there.queued, 4u);
  EXPECT_EQ(there.references, 6u);
  EXPECT_EQ(there.received, worker.received);
  ASSERT_EQ(there.open.size(), 1u);
  EXPECT_EQ(there.open[0].part, 123456);
  EXPECT_EQ(there.ended.at(0).id, 16u);
  EXPECT_EQ(there.pending.at(0).site, "train.cpp:3");
  EXPECT_EQ(there.serving.at(0).peer, "worker1");
  EXPECT_FALSE(there.serving.at(0).begun);
  EXPECT_THAT(there.passes.at(0).waits, ElementsAre("a tensor", "another"));
  EXPECT_EQ(there.threads, worker.threads);
}

TEST(HostReport, HasALimitedSize) {
  WorkerReport worker = make_worker(0);
  const std::string hostile(20'000, '\x01');
  for (int i = 0; i < 300; ++i) worker.pending.push_back({hostile, hostile, hostile, 1, true});
  const std::string text = encode_host_report(make_host(0, {worker}));
  EXPECT_LT(text.size(), std::size_t{4} << 20);
  const auto got = decode_host_report(text);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->workers.at(0).pending.size(), 256u);
  EXPECT_TRUE(decode_host_report(encode_host_report(make_host(0, {make_worker(0)}))));
}

TEST(HostReport, IsNothingElse) {
  const std::string good = encode_host_report(make_host(1, {make_worker(2)}));
  for (std::size_t size = 0; size + 1 < good.size(); ++size) {
    EXPECT_FALSE(decode_host_report(std::string_view(good).substr(0, size)));
  }
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  for (const std::string& text :
       {std::string("[]"), std::string("\xff"), changed("\"node\":1", "\"node\":-1"),
        changed("\"node\":1", "\"node\":99999999999"), changed("\"rank\":2", "\"rank\":\"2\""),
        changed("\"written\":false", "\"written\":0"), changed("\"answers\":true", "\"answers\":null"),
        changed("\"process_state\":\"S\"", "\"process_state\":\"\""),
        changed("\"notices\":[]", "\"notices\":[{}]"),
        encode_host_report(make_host(1, {make_worker(2), make_worker(2)}))}) {
    EXPECT_FALSE(decode_host_report(text)) << text;
  }
  const auto odd = decode_host_report(changed("\"process_state\":\"S\"", "\"process_state\":\"\\u001b\""));
  ASSERT_TRUE(odd);
  EXPECT_EQ(odd->workers.at(0).process_state, '?') << "it would control the terminal";
  const auto huge = decode_host_report(changed("\"world\":4", "\"world\":1e300"));
  ASSERT_TRUE(huge);
  EXPECT_EQ(huge->workers.at(0).world, 0);
}

TEST(HostReport, HasNoControlCharacters) {
  HostReport sent = make_host(1, {make_worker(2)});
  sent.host = "far\x1b[2J";
  sent.trouble = "no\nanswer";
  sent.page =
      "pages/\xc2\x9b"
      "1";
  const auto got = decode_host_report(encode_host_report(sent));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->host, "far [2J");
  EXPECT_EQ(got->trouble, "no answer");
  EXPECT_EQ(got->page, "pages/ 1");
  const auto job = decode_job_report(encode_job_report({.host = "near\a", .prefix = "w\r"}));
  ASSERT_TRUE(job);
  EXPECT_EQ(job->host, "near ");
  EXPECT_EQ(job->prefix, "w ");
}

TEST(JobReport, SurvivesItsEncodingAndIsNothingElse) {
  const JobReport sent{
      .node = 1, .host = "near", .workers = 2, .prefix = "w", .others = {make_host(0, {make_worker(0)})}};
  const std::string text = encode_job_report(sent);
  const auto got = decode_job_report(text);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->node, 1);
  EXPECT_EQ(got->host, "near");
  EXPECT_EQ(got->workers, 2);
  EXPECT_EQ(got->prefix, "w");
  ASSERT_EQ(got->others.size(), 1u);
  EXPECT_EQ(got->others[0].workers.at(0).name, "worker0");
  for (std::size_t size = 0; size + 1 < text.size(); ++size) {
    EXPECT_FALSE(decode_job_report(std::string_view(text).substr(0, size)));
  }
  EXPECT_FALSE(decode_job_report(R"({"node":0,"host":"","prefix":"","workers":0,"others":[]})"));
}

/// Two hosts with two ranks each, seen from host 0.
JobReport two_hosts(HostReport far) {
  return {.node = 0, .host = "near", .workers = 2, .prefix = "worker", .others = {std::move(far)}};
}

TEST(MergedHosts, NameTheHostOfAStoppedWorkerFirst) {
  const int group = group_number(std::vector<int>{0, 1, 2, 3});
  std::vector<WorkerReport> mine = {make_worker(0), make_worker(1)};
  std::vector<WorkerReport> theirs = {make_worker(2), make_worker(3)};
  for (WorkerReport* worker : {&mine[0], &mine[1], &theirs[0]}) {
    worker->open = {{"collective", "all_reduce", 3, 17, group}};
  }
  theirs[1].answers = false;
  theirs[1].process_state = 'T';
  theirs[1].process = 4711;
  const auto all = merge_hosts(mine, two_hosts(make_host(1, theirs)));
  ASSERT_EQ(all.size(), 4u);
  const auto suspects = find_suspects(all);
  ASSERT_FALSE(suspects.empty());
  EXPECT_EQ(
      suspects[0],
      "rank 3 (worker3, pid 4711 on host 1 (far)) is stopped by a signal; to continue it there: kill -CONT "
      "4711");
  EXPECT_THAT(format_diagnosis(all),
              AllOf(HasSubstr("\nrank 0  worker0  pid 100  state S  host 0 (near)\n"),
                    HasSubstr("\nrank 3  worker3  pid 4711  state T  host 1 (far)\n")));
}

TEST(MergedHosts, NameAHostThatDidNotAnswerWithItsRanks) {
  const int group = group_number(std::vector<int>{0, 1, 2, 3});
  std::vector<WorkerReport> mine = {make_worker(0), make_worker(1)};
  for (WorkerReport& worker : mine) worker.open = {{"collective", "all_reduce", 3, 17, group}};
  HostReport silent = make_host(1, {});
  silent.host = "";
  silent.trouble = "its launcher did not answer within 3.0 s";
  const auto all = merge_hosts(mine, two_hosts(silent));
  ASSERT_EQ(all.size(), 4u);
  const auto suspects = find_suspects(all);
  ASSERT_EQ(suspects.size(), 2u);
  EXPECT_THAT(suspects[0],
              AllOf(HasSubstr("ranks 0,1 are in 'all_reduce' number 17"),
                    HasSubstr("rank 2 is not in it: nothing is known of it: its launcher did not")));
  EXPECT_EQ(suspects[1],
            "nothing is known of host 1 with ranks 2,3: its launcher did not answer within 3.0 s");
  EXPECT_THAT(
      format_diagnosis(all),
      AllOf(HasSubstr("\nrank 2  worker2  host 1\n  its launcher did not answer"), Not(HasSubstr("pid 0"))));
}

TEST(MergedHosts, SayWhichRanksHaveNoProcess) {
  const auto all = merge_hosts({make_worker(1)}, two_hosts(make_host(1, {make_worker(2)})));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_THAT(all[0].trouble, HasSubstr("has not joined yet"));
  EXPECT_FALSE(all[0].host_silent);
  EXPECT_EQ(all[3].host, "far");
  EXPECT_TRUE(find_suspects(all).empty()) << "a rank that has not joined yet is no fault";
}

TEST(MergedHosts, IgnoreRanksOfAHostThatItDoesNotHave) {
  WorkerReport forged = make_worker(0);
  forged.name = "forged";
  const auto all =
      merge_hosts({make_worker(0), make_worker(1)}, two_hosts(make_host(1, {forged, make_worker(900000)})));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].name, "worker0");
  EXPECT_EQ(all[3].rank, 3);
}

}  // namespace
}  // namespace torchspan::launch::host_report_test
