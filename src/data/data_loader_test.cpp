#include <algorithm>
#include <atomic>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/data/datasets.h>
#include <torch/data/transforms.h>
#include <torch/types.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/future.h>
#include <torchspan/data.h>
#include <torchspan/detail/core/executor.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::data::data_loader_test {
namespace {

using testing::invalid_text;
using Samples = std::vector<std::int64_t>;

/// Returns a loader whose data are its samples.
DataLoader<Samples> loader_of(std::int64_t samples, const DataLoaderOptions& options) {
  return {samples, [](const DataStep& step) { return step.samples; }, options};
}

/// Waits for what the threads of a loader do.
template <class Condition>
void await(const Condition& condition) {
  const auto executor = make_executor();
  for (int i = 0; i < 30000 && !condition(); ++i) executor->sleep(std::chrono::milliseconds(1));
  ASSERT_TRUE(condition());
}

TEST(DataLoader, ReturnsTheStepsOfTheSamplerWhateverThreadsReadThem) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t limit) { return static_cast<int>(random() % limit); };
    DataLoaderOptions options{.batch = 1 + below(20), .size = 1 + below(4), .seed = random()};
    options.rank = below(static_cast<std::uint64_t>(options.size));
    options.batch_per_rank = below(2) == 0;
    options.shuffle = below(4) != 0;
    const std::int64_t samples = 1 + below(100);
    const std::int64_t full = options.batch * (options.batch_per_rank ? options.size : 1);
    options.drop_last = below(2) == 0 && samples >= full;
    DataLoaderOptions here = options;
    here.threads = 0;
    options.threads = 1 + below(3);
    options.ahead = 1 + below(5);
    DataLoader<Samples> loader = loader_of(samples, options), oracle = loader_of(samples, here);
    std::int64_t steps = 0;
    while (loader.position().epoch < 3) {
      ASSERT_EQ(loader.position(), oracle.position());
      const LoadedStep<Samples> step = loader.next(), expected = oracle.next();
      EXPECT_EQ(step.data, step.samples);
      EXPECT_EQ(step.samples, expected.samples);
      EXPECT_EQ(step.number, steps++);
      EXPECT_EQ(step.seed, expected.seed);
      EXPECT_EQ(step.weight, expected.weight);
      EXPECT_EQ(step.ends_epoch, loader.position().epoch != step.epoch);
    }
    EXPECT_EQ(steps, 3 * loader.steps_per_epoch());
  }
}

/// Several ranks save; others, of another number, continue from their checkpoint.
TEST(DataLoader, UsesEachSampleOfAnEpochOnceWhenOtherRanksContinueFromACheckpoint) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const testing::TemporaryFolder folder;
    const auto samples = static_cast<std::int64_t>(20 + random() % 60);
    Samples used;
    /// Runs `steps` steps, or to the end of the epoch, on `size` ranks from the newest checkpoint on, and saves one.
    const auto run = [&](int size, std::int64_t steps) {
      DataPosition end;
      for (int rank = 0; rank < size; ++rank) {
        DataLoader<Samples> loader = loader_of(samples, {.batch = 7,
                                                         .rank = rank,
                                                         .size = size,
                                                         .seed = rank == 0 ? seed : seed + 1,
                                                         .threads = rank % 2});
        CheckpointManager manager({.directory = folder.path(), .asynchronous = false});
        manager.add("data", loader);
        manager.restore_or(0);
        for (std::int64_t i = 0; i < steps && loader.position().epoch == 0; ++i) {
          const LoadedStep<Samples> step = loader.next();
          if (step.weight > 0) used.insert(used.end(), step.data.begin(), step.data.end());
        }
        end = loader.position();
      }
      DataLoader<Samples> loader = loader_of(samples, {.batch = 7, .rank = 0, .size = size, .seed = seed});
      loader.move_to(end);
      CheckpointManager manager({.directory = folder.path(), .asynchronous = false});
      manager.add("data", loader);
      manager.save(end.step);
      return end;
    };
    run(1, 1);  // the ranks below get its seed from the checkpoint
    run(1 + static_cast<int>(random() % 3), 1);
    run(1 + static_cast<int>(random() % 3), 1);
    EXPECT_EQ(run(1 + static_cast<int>(random() % 3), samples), (DataPosition{(samples + 6) / 7, 1, 0}));
    std::sort(used.begin(), used.end());
    Samples all(static_cast<std::size_t>(samples));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(used, all);
  }
}

TEST(DataLoader, RejectsACheckpointOfAnotherDataSet) {
  const testing::TemporaryFolder folder;
  const DataLoaderOptions options{.batch = 2, .rank = 0, .size = 1};
  DataLoader<Samples> ten = loader_of(10, options), eleven = loader_of(11, options);
  CheckpointManager first({.directory = folder.path()});
  first.add("data", ten);
  first.save(1);
  first.wait();
  CheckpointManager second({.directory = folder.path(), .name = "second"});
  second.add("data", eleven);
  const std::string text = invalid_text([&] { second.restore(); });
  EXPECT_NE(text.find("'data'"), std::string::npos) << text;
  EXPECT_NE(text.find("10 samples, and this one has 11"), std::string::npos) << text;
  EXPECT_EQ(eleven.position(), DataPosition());
}

TEST(DataLoader, GoesToAnyPosition) {
  const DataLoaderOptions options{.batch = 4, .rank = 0, .size = 1, .drop_last = true};
  DataLoader<Samples> loader = loader_of(10, options);
  const DataPosition second = (loader.next(), loader.position());
  const Samples expected = loader.next().data;
  loader.next();
  loader.move_to(second);
  EXPECT_EQ(loader.next().data, expected);
  loader.move_to({.step = 7, .epoch = 3, .next = 7});  // as a loader with another batch may have saved it
  EXPECT_EQ(loader.position(), (DataPosition{7, 4, 0})) << "three samples make no step";
  EXPECT_EQ(loader.next().epoch, 4);
}

TEST(DataLoader, ReadsAheadWhileAStepIsInUse) {
  std::atomic<int> read{0};
  DataLoader<Samples> loader(100,
                             [&](const DataStep& step) {
                               ++read;
                               return step.samples;
                             },
                             {.batch = 10, .rank = 0, .size = 1, .threads = 1, .ahead = 3});
  EXPECT_EQ(read, 0) << "reads before the first step, perhaps from a place that a checkpoint changes";
  loader.next();
  await([&] { return read == 4; });
  loader.next();
  await([&] { return read == 5; });
}

TEST(DataLoader, ThrowsWhatReadingThrewAtItsStepAndReadsItAgain) {
  for (const int threads : {0, 1, 3}) {
    SCOPED_TRACE(threads);
    auto failures = std::make_shared<std::atomic<int>>(2);
    DataLoader<Samples> loader(40,
                               [failures](const DataStep& step) {
                                 if (step.number == 2 && failures->fetch_sub(1) > 0)
                                   throw std::runtime_error("the disk is gone");
                                 return step.samples;
                               },
                               {.batch = 10, .rank = 0, .size = 1, .threads = threads, .ahead = 2});
    Samples used = loader.next().data;
    const auto add = [&] {
      const Samples more = loader.next().data;
      used.insert(used.end(), more.begin(), more.end());
    };
    add();
    const DataPosition before = loader.position();
    EXPECT_THROW(add(), std::runtime_error);
    EXPECT_EQ(loader.position(), before);
    EXPECT_THROW(add(), std::runtime_error);
    add();
    add();
    std::sort(used.begin(), used.end());
    Samples all(40);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(used, all);
  }
}

TEST(DataLoader, DoesNotReadWhatNobodyWaitsForWhenItIsDestroyed) {
  std::atomic<int> read{0};
  std::atomic<bool> go{false};
  auto loader = std::make_unique<DataLoader<Samples>>(
      1000,
      [&](const DataStep& step) {
        if (step.number > 0) await([&] { return go.load(); });
        ++read;
        return step.samples;
      },
      DataLoaderOptions{.batch = 10, .rank = 0, .size = 1, .threads = 1, .ahead = 50});
  loader->next();
  const auto executor = make_executor();
  Thread destroyer = executor->spawn("destroyer", [&] { loader.reset(); });
  executor->sleep(std::chrono::milliseconds(20));
  go = true;
  destroyer.join();
  EXPECT_LE(read, 2) << "the step before, and the one that was being read";
}

/// A child has neither the threads nor what they read; parent and child go on alike.
TEST(DataLoader, GoesOnInAForkedChildAndInItsParent) {
  const DataLoaderOptions options{.batch = 7, .rank = 0, .size = 1, .threads = 2, .ahead = 3};
  DataLoader<Samples> loader = loader_of(100, options), oracle = loader_of(100, options);
  const auto goes_on = [&] {
    for (int i = 0; i < 20; ++i) {
      if (loader.next().data != oracle.next().data) return false;
    }
    return true;
  };
  for (int i = 0; i < 3; ++i) {
    loader.next();
    oracle.next();
  }
  const pid_t child = ::fork();
  if (child == 0) ::_exit(goes_on() ? 0 : 1);
  EXPECT_TRUE(goes_on());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(DataLoader, ReadsDataSetsOfLibTorch) {
  const torch::Tensor x = torch::arange(20, torch::kDouble).view({10, 2});
  auto set = torch::data::datasets::TensorDataset(x).map(
      torch::data::transforms::Stack<torch::data::TensorExample>());
  DataLoader loader(set, {.batch = 4, .rank = 0, .size = 2});
  const auto step = loader.next();
  EXPECT_TRUE(torch::equal(step.data.data, x.index_select(0, torch::tensor(step.samples))));
  const testing::TemporaryFolder folder;
  std::ofstream(folder.path() + "/records") << "0123456789";
  DataLoader files(RecordFiles({folder.path() + "/records"}),
                   {.batch = 4, .rank = 1, .size = 2, .shuffle = false});
  EXPECT_TRUE(torch::equal(files.next().data, torch::tensor({'2', '3'}, torch::kByte)));
}

TEST(DataLoader, NamesWrongOptions) {
  const auto text = [](std::int64_t samples, const DataLoaderOptions& options) {
    return invalid_text([&] { loader_of(samples, options); });
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(text(10, {.rank = 0, .size = 1}), "batch is 0");
  has(text(10, {.batch = 1, .rank = 0}), "size is 0; expected the number of ranks");
  has(text(10, {.batch = 1, .size = 2}), "rank is -1; expected this rank among them");
  has(text(10, {.batch = 1, .rank = 2, .size = 2}), "rank is 2");
  has(text(10, {.batch = 1, .rank = 0, .size = 1, .threads = -1}), "threads is -1");
  has(text(10, {.batch = 1, .rank = 0, .size = 1, .ahead = 0}), "ahead is 0");
  has(text(0, {.batch = 1, .rank = 0, .size = 1}), "has none");
  has(text(10, {.batch = 6, .batch_per_rank = true, .rank = 0, .size = 2, .drop_last = true}),
      "10 samples make no step of 12");
  DataLoader<Samples> loader = loader_of(10, {.batch = 3, .rank = 0, .size = 1});
  has(invalid_text([&] { loader.move_to({.step = 1, .epoch = 0, .next = 11}); }), "an epoch has 10 samples");
}

}  // namespace
}  // namespace torchspan::data::data_loader_test
