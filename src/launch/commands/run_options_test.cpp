#include "launch/commands/run_options.h"

#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::launch::run_options_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(RunOptions, TakeTimesWithUnits) {
  EXPECT_EQ(parse_duration("500ms", "--grace"), milliseconds(500));
  EXPECT_EQ(parse_duration("1.5s", "--grace"), milliseconds(1500));
  EXPECT_EQ(parse_duration("2m", "--grace"), seconds(120));
  EXPECT_EQ(parse_duration("1h", "--grace"), seconds(3600));
  EXPECT_EQ(parse_duration("0", "--grace"), seconds(0));
  EXPECT_EQ(parse_duration("110", "--grace"), seconds(110));
  for (const char* text : {"", "s", "-1s", "1d", "8 s", "1s ", "nan", "inf", "1e9s", "169h"}) {
    EXPECT_THROW(parse_duration(text, "--grace"), Error) << text;
  }
}

TEST(RunOptions, BecomeTheJobs) {
  RunOptions options;
  options.workers = "2:4";
  options.backoff = "3s";
  options.longest_backoff = "10s";
  options.grace = "110s";
  options.preempt_signal = "SIGUSR2";
  options.settings = {"A=1"};
  const JobOptions job = read_run_options(options, {{"TORCHELASTIC_ERROR_FILE", "/outer.json"}});
  EXPECT_EQ(job.workers, 4);
  EXPECT_EQ(job.least_workers, 2);
  EXPECT_EQ(job.restarts.backoff, seconds(3));
  EXPECT_EQ(job.restarts.longest_backoff, seconds(10));
  EXPECT_EQ(job.preemption.grace, seconds(110));
  EXPECT_EQ(job.preemption.signal, SIGUSR2);
  EXPECT_EQ(job.extra.at("A"), "1");
  EXPECT_EQ(job.error_file, "/outer.json");
}

TEST(RunOptions, TakeTheNumberOfWorkersFromAPodOfTheKubernetesTrainer) {
  RunOptions options;
  EXPECT_EQ(read_run_options(options, {{"PET_NPROC_PER_NODE", "3"}, {"PET_NNODES", "1"}}).workers, 3);
  EXPECT_EQ(read_run_options(options, {{"PET_NPROC_PER_NODE", "3"}}).workers, 3);
  EXPECT_THROW(read_run_options(options, {}), Error);
  EXPECT_THROW(read_run_options(options, {{"PET_NPROC_PER_NODE", "auto"}}), Error);
  EXPECT_THROW(read_run_options(options, {{"PET_NPROC_PER_NODE", "3"}, {"PET_NNODES", "2"}}), Error)
      << "each pod would run a job of three workers: the other pods are not known";
  options.workers = "2";
  EXPECT_EQ(read_run_options(options, {{"PET_NPROC_PER_NODE", "3"}}).workers, 2);
}

TEST(RunOptions, HaveTheDocumentedDefaults) {
  RunOptions options;
  options.workers = "1";
  const JobOptions job = read_run_options(options, {});
  EXPECT_EQ(job.restarts.most, 0);
  EXPECT_EQ(job.restarts.most_replacements, 0);
  EXPECT_EQ(job.restarts.backoff, seconds(1));
  EXPECT_EQ(job.restarts.longest_backoff, seconds(60));
  EXPECT_EQ(job.restarts.give_up_after, 3);
  EXPECT_EQ(job.preemption.grace, seconds(30));
  EXPECT_EQ(job.preemption.signal, SIGUSR1);
  EXPECT_EQ(job.preemption.clean_code, 0);
  EXPECT_EQ(job.error_file, "");
}

TEST(RunOptions, OfSeveralHostsKeepTheNumberOfWorkers) {
  const torchspan::testing::TemporaryFolder folder;
  net::Secret::random().write_file(folder.path() + "/secret");
  const Environment environment{{"TORCHSPAN_SECRET_FILE", folder.path() + "/secret"}};
  RunOptions good;
  good.workers = "2";
  good.nodes = {.nodes = "2", .node_rank = "1", .rdzv = "node0"};
  EXPECT_EQ(read_run_options(good, environment).nodes.node_rank, 1);
  const auto refusal = [&](auto change) {
    RunOptions options = good;
    change(options);
    return torchspan::testing::error_of([&] { read_run_options(options, environment); }).message();
  };
  using ::testing::HasSubstr;
  good.job.restarts.most = 1;
  EXPECT_EQ(read_run_options(good, environment).restarts.most, 1);
  EXPECT_THAT(refusal([](RunOptions& options) { options.job.restarts.most_replacements = 1; }),
              HasSubstr("--max-replacements"));
  EXPECT_THAT(refusal([](RunOptions& options) { options.workers = "1:2"; }), HasSubstr("MIN:MAX"));
  EXPECT_THAT(refusal([](RunOptions& options) { options.job.master_port = 9; }), HasSubstr("--master-port"));
}

}  // namespace
}  // namespace torchspan::launch::run_options_test
