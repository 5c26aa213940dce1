#include "checkpoint/commit/agreement.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/checkpoint.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::agreement_test {

using std::chrono::seconds;
using ::testing::HasSubstr;
using torchspan::testing::ClusterOptions;
using torchspan::testing::invalid_text;
using torchspan::testing::SimCluster;
using torchspan::testing::TemporaryFolder;

ClusterOptions cluster_of(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  return options;
}

/// Counts the exchanges of listings. The first one may fail on this rank after it has succeeded on the others.
class CountingRanks final : public Ranks {
 public:
  CountingRanks(std::unique_ptr<Ranks> ranks, bool fails_first)
      : ranks_(std::move(ranks)), fails_first_(fails_first) {}
  std::size_t index() const override { return ranks_->index(); }
  const std::vector<std::string>& names() const override { return ranks_->names(); }
  std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) override {
    auto all = ranks_->gather(tag, mine);
    if (tag != "listing") return all;
    if (exchanges++ == 0 && fails_first_) throw Error(ErrorKind::kTimedOut, "late");
    return all;
  }
  int exchanges = 0;

 private:
  const std::unique_ptr<Ranks> ranks_;
  const bool fails_first_;
};

SaveJob agree_on(SaveAgreement& agreement, std::int64_t step, const Listing& listing) {
  const RankOutcome proposal = outcome_of([&] {
    const auto token = 100 + static_cast<std::uint64_t>(step);
    return encode_proposal({step, token, agreement.digest_of(listing), {}, {}});
  });
  return agreement.agree(proposal, step, listing);
}

TEST(SaveAgreement, ExchangesListingsUntilAllRanksHaveThePlan) {
  SimCluster cluster(cluster_of(3, 1));
  cluster.run([](Worker& worker) {
    CountingRanks ranks(make_worker_ranks(worker, {}, "test", seconds(60)), worker.rank() == 1);
    SaveAgreement agreement(ranks);
    Listing listing{{"w", ElementType::kF32, {4}, whole_box({4})}};
    const auto shares_of = [&](std::int64_t step) {
      return agree_on(agreement, step, listing).plan.shares.size();
    };
    if (worker.rank() == 1) {
      EXPECT_THROW(shares_of(1), Error);
    } else {
      EXPECT_EQ(shares_of(1), 1u);
    }
    EXPECT_EQ(shares_of(2), 1u) << "the ranks that have a plan exchange again";
    EXPECT_EQ(ranks.exchanges, 2);
    EXPECT_EQ(shares_of(3), 1u);
    EXPECT_EQ(ranks.exchanges, 2) << "nothing has changed";
    if (worker.rank() == 2) listing.push_back({"v", ElementType::kF32, {}, whole_box({})});
    EXPECT_EQ(shares_of(4), 2u);
    EXPECT_EQ(ranks.exchanges, 3);
  });
}

TEST(SaveAgreement, NamesTextThatIsNotUtf8) {
  EXPECT_THAT(invalid_text([] {
                encode_proposal({.values = {{"label", std::string("\xff")}}});
              }),
              HasSubstr("the text 'label' is not UTF-8"));
  EXPECT_THAT(invalid_text([] { encode_proposal({.values = {{"\xff", true}}}); }), HasSubstr("rename it"));
}

/// The rows of a tensor that a rank has.
class Rows final : public StateSource {
 public:
  Rows(at::Tensor rows, std::int64_t rank, std::int64_t ranks)
      : rows_(std::move(rows)), offset_(rank * rows_.size(0)), total_(ranks * rows_.size(0)) {}
  void save(StateWriter& writer) const override { writer.add_shard("", rows_, {total_}, {offset_}); }
  void load(const StateReader& reader) override { reader.read_shard_into("", rows_, {offset_}); }
  bool owns_names() const override { return false; }

 private:
  const at::Tensor rows_;
  const std::int64_t offset_, total_;
};

/// A rank with its part of the state, and its manager.
struct Part {
  Part(Worker& worker, const std::string& folder, const std::vector<std::string>& names)
      : manager(worker, {.directory = folder, .rng = false, .participants = names, .timeout = seconds(60)}) {
    const auto place = std::ranges::find(names, worker.name());
    rank = static_cast<std::int64_t>(place - names.begin());
    manager.add_source("rows", std::make_unique<Rows>(rows, rank, static_cast<std::int64_t>(names.size())));
  }
  void save(std::int64_t step) {
    rows.fill_(10 * step + rank);
    manager.save(step);
    manager.wait();
  }
  /// From the step that all ranks have saved; then saves two steps.
  void continue_from(std::int64_t step) {
    EXPECT_EQ(manager.restore(), step);
    EXPECT_TRUE(rows.eq(10 * step + rank).all().item<bool>());
    save(step + 1);
    save(step + 2);
  }

  at::Tensor rows = at::zeros({2}, at::kLong);
  std::int64_t rank = 0;
  CheckpointManager manager;
};

void expect_saved(const std::string& folder, std::int64_t step, std::int64_t ranks) {
  const Checkpoint newest = Checkpoint::newest(folder);
  EXPECT_EQ(newest.step(), step);
  EXPECT_TRUE(
      newest.read("rows").equal(at::arange(10 * step, 10 * step + ranks, at::kLong).repeat_interleave(2)));
}

TEST(CheckpointManager, SavesWithAManagerThatOneRankHasMadeAgain) {
  const TemporaryFolder folder;
  const std::vector<std::string> names{"worker0", "worker1"};
  SimCluster cluster(cluster_of(2, 1));
  cluster.run([&](Worker& worker) {
    std::optional<Part> part(std::in_place, worker, folder.path(), names);
    part->save(1);
    if (worker.rank() == 1) part.emplace(worker, folder.path(), names);
    part->continue_from(1);
  });
  expect_saved(folder.path(), 3, 2);
}

/// One rank dies after a save. The others keep their managers; its replacement has a new one.
void replace_rank(const std::vector<std::string>& names, int victim) {
  SCOPED_TRACE(names.front() + ", " + std::to_string(victim));
  const TemporaryFolder folder;
  ClusterOptions options = cluster_of(3, 1 + static_cast<std::uint64_t>(victim));
  options.graceful = false;
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    const auto pass = [&](int time) { cluster.executor().sleep(seconds(time)); };
    std::optional<Part> part;
    if (std::ranges::find(names, worker.name()) != names.end()) part.emplace(worker, folder.path(), names);
    if (part) part->save(1);
    Thread replacement;
    if (worker.rank() == victim) {
      part.reset();  // releases the lock, as the end of a process does
      return pass(100);
    }
    if (worker.rank() == 0) {
      pass(3);
      cluster.kill(victim);
      pass(1);
      replacement = cluster.start(victim, 1, [&](rpc::WorkerService& service) {
        Part(service.worker(), folder.path(), names).continue_from(1);
        pass(30);
      });
    }
    pass(10);
    if (part) part->continue_from(1);
    pass(30);
    replacement.join();
  });
  expect_saved(folder.path(), 3, static_cast<std::int64_t>(names.size()));
}

TEST(CheckpointManager, KeptBySurvivorsSavesAndRestoresWithTheReplacementOfADeadRank) {
  replace_rank({"worker0", "worker1", "worker2"}, 1);
  replace_rank({"worker0", "worker1", "worker2"}, 2);
  replace_rank({"worker1", "worker2"}, 1);  // the rank that commits
}

}  // namespace torchspan::checkpoint::agreement_test
