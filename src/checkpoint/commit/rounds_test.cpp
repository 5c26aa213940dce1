#include "checkpoint/commit/rounds.h"

#include <cerrno>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/commit/ranks.h"
#include "tests/support/cluster.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::rounds_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::ClusterOptions;
using torchspan::testing::SimCluster;
using torchspan::testing::TemporaryFolder;

constexpr int kWorkers = 3;

/// Kills its worker at its gather number `at`, before or after it took part.
class CrashingRanks final : public Ranks {
 public:
  CrashingRanks(std::unique_ptr<Ranks> ranks, int at, bool after, std::function<void()> die)
      : ranks_(std::move(ranks)), at_(at), after_(after), die_(std::move(die)) {}
  std::size_t index() const override { return ranks_->index(); }
  const std::vector<std::string>& names() const override { return ranks_->names(); }
  std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) override {
    const bool now = gathers_++ == at_;
    if (now && !after_) die_();
    auto all = ranks_->gather(tag, mine);
    if (now && after_) die_();
    return all;
  }

 private:
  const std::unique_ptr<Ranks> ranks_;
  const int at_;
  const bool after_;
  const std::function<void()> die_;
  int gathers_ = 0;
};

/// Rank r has rows 2r and 2r + 1 of a tensor of six rows, and a replica of another one; all hold the step.
struct Content {
  explicit Content(int rank, std::int64_t step) : shard(6, step * 10 + rank), replica(4, step) {
    listing = {{"rows", ElementType::kI64, {6, 3}, {{2 * rank, 0}, {2, 3}}},
               {"all", ElementType::kI64, {4}, whole_box({4})}};
  }
  std::vector<BytesView> data(const Plan::Share& share) const {
    std::vector<BytesView> views;
    for (const std::size_t part : share.parts)
      views.push_back(std::as_bytes(std::span(part == 0 ? shard : replica)));
    return views;
  }
  std::vector<std::int64_t> shard, replica;
  Listing listing;
};

SaveJob job_of(std::int64_t step) {
  SaveJob job;
  job.step = step;
  job.token = 77;
  std::vector<std::string> names;
  for (int rank = 0; rank < kWorkers; ++rank) {
    job.listings.push_back(Content(rank, step).listing);
    names.push_back(fmt::format("rank {}", rank));
  }
  job.plan = make_plan(job.listings, names);
  return job;
}

void save_once(Ranks& ranks, const Directory& directory, std::int64_t step) {
  Log log("test", LogLevel::kOff);
  const SaveJob job = job_of(step);
  const Content content(static_cast<int>(ranks.index()), step);
  SaveRound(ranks, directory, log).run(job, content.data(*job.plan.own_share(ranks.index())), {});
}

/// The step of the newest checkpoint; fails the test if any folder that looks like one is damaged.
std::int64_t newest_step(const Directory& directory) {
  std::int64_t newest = -1;
  for (const Committed& one : directory.committed()) {
    const std::string folder = directory.path_of(one.name);
    const Manifest manifest = open_manifest(directory.disk(), folder);
    verify_data(directory.disk(), folder, manifest);
    EXPECT_EQ(manifest.step, one.step);
    EXPECT_EQ(manifest.tensors.at("rows").boxes.size(), 3u);
    EXPECT_EQ(manifest.tensors.at("all").boxes.size(), 1u) << "a replica is written once";
    newest = std::max(newest, one.step);
  }
  return newest;
}

ClusterOptions cluster_of_three(std::uint64_t seed) {
  ClusterOptions options;
  options.workers = kWorkers;
  options.seed = seed;
  return options;
}

TEST(SaveRound, IsACheckpointForAllOrForNoneWheneverARankDies) {
  const Disk disk;
  int saved = 0, lost = 0;
  for (int victim = 0; victim < kWorkers; ++victim) {
    for (int at = 0; at < 2; ++at) {
      for (const bool after : {false, true}) {
        SCOPED_TRACE(fmt::format("rank {} dies {} gather {}", victim, after ? "after" : "before", at));
        const TemporaryFolder folder;
        const Directory directory(disk, folder.path());
        const std::uint64_t seed = 1 + static_cast<std::uint64_t>(4 * victim + 2 * at + after);
        SimCluster cluster(cluster_of_three(seed));
        std::vector<std::string> errors(kWorkers);
        const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
          const int rank = service.worker().rank();
          service.worker().runtime().log.set_level(LogLevel::kOff);
          auto ranks = make_worker_ranks(service.worker(), {}, "test", std::chrono::seconds(60));
          save_once(*ranks, directory, 1);
          if (rank == victim) {
            ranks = std::make_unique<CrashingRanks>(std::move(ranks), at, after, [&] {
              cluster.kill(victim);
              service.stop("killed by the test");
            });
          }
          try {
            save_once(*ranks, directory, 2);
          } catch (const Error& error) {
            errors[static_cast<std::size_t>(rank)] = error.message();
          }
        });
        for (int rank = 0; rank < kWorkers; ++rank) {
          if (rank != victim) {
            EXPECT_EQ(failures[static_cast<std::size_t>(rank)], nullptr);
          }
        }
        const std::int64_t step = newest_step(directory);
        (step == 2 ? saved : lost) += 1;
        for (int rank = 0; rank < kWorkers; ++rank) {
          const std::string& error = errors[static_cast<std::size_t>(rank)];
          if (rank == victim) continue;
          if (error.empty()) {
            EXPECT_EQ(step, 2) << "save() returned on rank " << rank;
          } else {
            EXPECT_THAT(error, HasSubstr(fmt::format("worker{}", victim)));
          }
        }
        directory.delete_leftovers();
        EXPECT_EQ(newest_step(directory), step);
      }
    }
  }
  EXPECT_GT(saved, 0);
  EXPECT_GT(lost, 0);
}

/// A disk that is full, or fails in another way, from a certain call on.
class FullDisk final : public DiskCalls {
 public:
  explicit FullDisk(int calls) : calls_(calls) {}
  ssize_t pwrite(int fd, const void* data, std::size_t size, off_t offset) override {
    return fails() ? -1 : DiskCalls::pwrite(fd, data, size, offset);
  }
  int fsync(int fd) override { return fails() ? -1 : DiskCalls::fsync(fd); }
  int rename(const char* from, const char* to) override { return fails() ? -1 : DiskCalls::rename(from, to); }
  bool failed() const { return failed_; }

 private:
  bool fails() {
    if (calls_-- > 0) return false;
    errno = ENOSPC;
    failed_ = true;
    return true;
  }
  int calls_;
  bool failed_ = false;
};

/// Another process may have the rank of one that died: a rank that is late must not wait for it.
TEST(SaveRound, DoesNotBeginARoundAfterADeathThatItHasSeen) {
  const TemporaryFolder folder;
  const Directory directory(Disk(), folder.path());
  SimCluster cluster(cluster_of_three(1));
  std::string error;
  static_cast<void>(cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    worker.runtime().log.set_level(LogLevel::kOff);
    if (worker.rank() == 2) {
      worker.barrier();
      cluster.kill(2);
      service.stop("killed by the test");
      return;
    }
    const auto ranks = make_worker_ranks(worker, {}, "test", std::chrono::seconds(60));
    SaveJob job = job_of(1);
    job.departures = ranks->departures().count;
    worker.barrier();
    if (worker.rank() != 0) return;
    while (ranks->departures().count == 0) worker.runtime().executor.sleep(std::chrono::milliseconds(1));
    struct NeverWaits final : Ranks {
      explicit NeverWaits(Ranks& of) : ranks(of) {}
      std::size_t index() const override { return ranks.index(); }
      const std::vector<std::string>& names() const override { return ranks.names(); }
      Departures departures() const override { return ranks.departures(); }
      std::vector<Bytes> gather(const std::string& tag, const Bytes&) override {
        ADD_FAILURE() << "waits in " << tag;
        return {};
      }
      Ranks& ranks;
    } never(*ranks);
    SaveRound round(never, directory, worker.runtime().log);
    const Content content(0, 1);
    try {
      round.run(job, content.data(*job.plan.own_share(0)), {}, {});
    } catch (const Error& failure) {
      error = failure.message();
    }
  }));
  EXPECT_THAT(error, AllOf(HasSubstr("may not have been saved"), HasSubstr("worker2")));
}

TEST(SaveRound, FailsOnAllRanksWhenTheDiskOfOneIsFull) {
  for (int victim = 0; victim < kWorkers; ++victim) {
    for (int calls = 0;; ++calls) {
      SCOPED_TRACE(fmt::format("the disk of rank {} is full after {} calls", victim, calls));
      const TemporaryFolder folder;
      FullDisk faulty(calls);
      const Disk sound, full(&faulty);
      std::vector<std::string> errors(kWorkers);
      SimCluster cluster(cluster_of_three(1 + static_cast<std::uint64_t>(calls)));
      cluster.run([&](Worker& worker) {
        const auto ranks = make_worker_ranks(worker, {}, "test", std::chrono::seconds(60));
        const Directory directory(worker.rank() == victim ? full : sound, folder.path());
        try {
          save_once(*ranks, directory, 2);
        } catch (const Error& error) {
          errors[static_cast<std::size_t>(worker.rank())] = error.message();
          EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
        }
      });
      if (!faulty.failed()) {
        EXPECT_EQ(newest_step(Directory(sound, folder.path())), 2);
        break;
      }
      for (const std::string& error : errors) {
        EXPECT_THAT(error, AllOf(HasSubstr(fmt::format("rank {} ('worker{}'): cannot ", victim, victim)),
                                 HasSubstr(folder.path()), HasSubstr("No space left on device")));
      }
      EXPECT_EQ(newest_step(Directory(sound, folder.path())), -1);
    }
  }
}

TEST(RestoreRound, ChoosesOneCheckpointForAllRanksAlthoughOnlyOneOfThemFindsTheDamage) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  SimCluster cluster(cluster_of_three(1));
  cluster.run([&](Worker& worker) {
    const auto ranks = make_worker_ranks(worker, {}, "test", std::chrono::seconds(60));
    for (const std::int64_t step : {1, 2, 3}) save_once(*ranks, directory, step);
    if (worker.rank() == 1) {
      // The last byte of the file of rank 2: only the rank that checks this part notices.
      const std::string path = directory.path_of("step-00000003/model-00003-of-00003.safetensors");
      std::string bytes = disk.read_file(path, 1 << 20);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      disk.write_file(path, bytes);
    }
    ranks->gather("damaged", {});
    std::vector<std::string> lines;
    Log log("test", LogLevel::kWarning, [&](LogLevel, const std::string& line) { lines.push_back(line); });
    std::vector<std::string> loaded;
    // Only rank 1 reads the tensors, which is enough.
    const auto read_all = [&](const Manifest& manifest) {
      return Bytes(manifest.tensors.size(), static_cast<std::byte>(worker.rank() == 1));
    };
    const auto step =
        RestoreRound(*ranks, directory, log).run([&](const std::string& name, const Manifest& manifest) {
          loaded.push_back(name);
          return read_all(manifest);
        });
    EXPECT_EQ(step, 2);
    EXPECT_THAT(loaded, ::testing::ElementsAre(directory.path_of("step-00000002")));
    EXPECT_EQ(lines.size(), worker.rank() == 0 ? 1u : 0u);
    const auto thrown = torchspan::testing::error_of([&] {
      RestoreRound(*ranks, directory, log).run([&](const std::string&, const Manifest& manifest) {
        if (worker.rank() == 2) throw_invalid("the model differs");
        return read_all(manifest);
      });
    });
    EXPECT_THAT(thrown.message(), HasSubstr("rank 2 ('worker2'): the model differs"));
    lines.clear();
    RestoreRound(*ranks, directory, log).run([](const std::string&, const Manifest&) { return Bytes(); });
    ASSERT_EQ(lines.size(), worker.rank() == 0 ? 2u : 0u) << "damage, and tensors that no rank reads";
    if (worker.rank() == 0) {
      EXPECT_THAT(lines[1], HasSubstr("'step-00000002' was restored without "));
    }
  });
}

TEST(WorkerRanks, GatherBytesOfAnyLength) {
  SimCluster cluster(cluster_of_three(1));
  cluster.run([&](Worker& worker) {
    const auto ranks = make_worker_ranks(worker, {}, "test", std::chrono::seconds(60));
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{61440}, std::size_t{61441}, std::size_t{300000}}) {
      const Bytes mine(worker.rank() == 1 ? size : size / 3, static_cast<std::byte>(worker.rank() + 1));
      const auto all = ranks->gather("bytes", mine);
      EXPECT_EQ(all[1], Bytes(size, std::byte{2}));
      EXPECT_EQ(all[2], Bytes(size / 3, std::byte{3}));
    }
  });
}

TEST(SavePlan, NamesTheRanksThatDisagree) {
  const ListedPart whole{"w", ElementType::kF32, {4, 2}, whole_box({4, 2})};
  const auto refusal = [&](std::vector<Listing> listings) {
    return torchspan::testing::invalid_text([&] { make_plan(listings, {"rank 0", "rank 1"}); });
  };
  ListedPart other = whole;
  other.shape = {4, 3};
  other.box = whole_box({4, 3});
  EXPECT_THAT(refusal({{whole}, {other}}),
              HasSubstr("rank 0 saves 'w' with shape [4, 2] and dtype F32, but rank 1 with shape [4, 3]"));
  ListedPart half = whole;
  half.box = {{0, 0}, {2, 2}};
  EXPECT_THAT(refusal({{half}, {}}), HasSubstr("4 of the elements of [0:4, 0:2] are in no part"));
  EXPECT_THAT(refusal({{half}, {whole}}), HasSubstr("overlap"));
  ListedPart marked = whole;
  marked.fingerprint = 3;
  EXPECT_THAT(refusal({{whole}, {marked}}), HasSubstr("which are not replicas"));
  ListedPart longer = other;
  longer.fingerprint = 4;
  EXPECT_THAT(refusal({{marked}, {longer}}), HasSubstr("which are not replicas"));
}

// LibTorch names the parameters of an optimizer's archive by their addresses, whose lengths differ between processes.
TEST(SavePlan, WritesTheFirstOfReplicasWhoseBytesDiffer) {
  ListedPart archive{"optimizer.archive", ElementType::kU8, {100}, whole_box({100}), 7};
  ListedPart longer = archive;
  longer.shape = {228};
  longer.box = whole_box({228});
  const Plan plan = make_plan({{archive}, {longer}, {archive}}, {"rank 0", "rank 1", "rank 2"});
  ASSERT_EQ(plan.shares.size(), 1u);
  EXPECT_EQ(plan.shares[0].rank, 0u);
  ASSERT_EQ(plan.shares[0].entries.size(), 1u);
  EXPECT_EQ(plan.shares[0].entries[0].shape, Sizes{100});
}

}  // namespace torchspan::checkpoint::rounds_test
