#include <filesystem>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/pipeline.h>

#include "tests/support/errors.h"
#include "tests/support/pipeline_world.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::resharding_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::invalid_text;
using torchspan::testing::on_workers;
using torchspan::testing::TemporaryFolder;

constexpr std::int64_t kWidth = 5;
constexpr int kLayers = 5;

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

struct DenseImpl : torch::nn::Module {
  explicit DenseImpl(std::uint64_t seed) {
    weight = register_parameter("weight", numbers({kWidth, kWidth}, seed));
    seen = register_buffer("seen", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return at::tanh(at::matmul(x, weight));
  }
  at::Tensor weight, seen;
};
TORCH_MODULE(Dense);

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// The weights after `steps` steps in one process. `tied`: the last layer has the first one's weight.
std::vector<at::Tensor> plain_weights(int steps, bool tied) {
  std::vector<Dense> layers;
  std::vector<at::Tensor> parameters;
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    layers.emplace_back(layer);
    parameters.push_back(layers.back()->weight);
  }
  if (tied) {
    layers.back()->weight = parameters.front();
    parameters.pop_back();
  }
  optim::Optimizer optimizer(parameters, optim::Adam{.lr = 0.01});
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    at::Tensor x = numbers({6, kWidth}, 100 + static_cast<std::uint64_t>(step));
    for (Dense& layer : layers) x = layer->forward(x);
    mean_square(x, numbers({6, kWidth}, 200 + static_cast<std::uint64_t>(step))).backward();
    optimizer.step();
  }
  if (tied) parameters.push_back(parameters.front());
  return parameters;
}

/// The names of the newest checkpoint's tensors and values, without the generators, of which each rank has one.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names = Checkpoint::newest(folder).names();
  std::erase_if(names, [](const std::string& name) { return name.starts_with("rng."); });
  return names;
}

/// Trains a pipeline from its newest checkpoint to `last` steps and saves; compares with one process. `tied`: the
/// first and the last layer have equal weights. `replicas` share the rows of each batch unevenly.
void train_pipeline(Worker& worker, const std::string& folder, const std::vector<int>& balance, int first,
                    int last, bool tied = false, int replicas = 1) {
  pipeline::Layers layers;
  std::vector<pipeline::TiedParameter> weights;
  // The seeds matter in the first run only; later ones restore.
  for (std::uint64_t layer = 0; layer < kLayers; ++layer)
    weights.emplace_back(layers.add<Dense>(first == 0 ? layer : 77 + layer), "weight");
  if (tied) layers.tie({weights.front(), weights.back()});
  pipeline::Pipeline pipe(worker, layers, {.balance = balance, .replicas = replicas, .micro_batches = 2});
  const auto part = [&](const at::Tensor& rows) {  // 6, or 4 and 2
    return replicas == 1 ? rows : pipe.replica() == 0 ? rows.narrow(0, 0, 4) : rows.narrow(0, 4, 2);
  };
  optim::Optimizer optimizer(
      {optim::ParamGroup(pipe.parameters(), optim::Adam{.lr = 0.01}, pipe.parameter_names())});
  CheckpointManager manager(worker, {.directory = folder});
  manager.add("pipe", pipe);
  manager.add("optimizer", optimizer);
  const std::int64_t from = manager.restore_or(0);
  EXPECT_EQ(from, first);
  for (std::int64_t step = from; step < last; ++step) {
    optimizer.zero_grad();
    pipe.train_step(part(numbers({6, kWidth}, 100 + static_cast<std::uint64_t>(step))),
                    part(numbers({6, kWidth}, 200 + static_cast<std::uint64_t>(step))), mean_square);
    optimizer.step();
  }
  manager.save(last);
  manager.wait();
  const std::vector<at::Tensor> expected = plain_weights(last, tied);
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto module = pipe.module(layer);
    if (!module) continue;
    EXPECT_TRUE(
        at::allclose(module->parameters()[0], expected[static_cast<std::size_t>(layer)], 1e-10, 1e-12))
        << "layer " << layer;
  }
}

TEST(Resharding, ContinuesAPipelineOfTwoStagesWithThreeAndWithOne) {
  const TemporaryFolder folder;
  on_workers(2, 1, [&](Worker& worker) { train_pipeline(worker, folder.path(), {2, 3}, 0, 3); });
  on_workers(3, 2, [&](Worker& worker) { train_pipeline(worker, folder.path(), {1, 1, 3}, 3, 5); });
  on_workers(1, 3, [&](Worker& worker) { train_pipeline(worker, folder.path(), {5}, 5, 7); });
  on_workers(2, 4, [&](Worker& worker) { train_pipeline(worker, folder.path(), {4, 1}, 7, 8); });
}

TEST(Resharding, ContinuesAPipelineWithTiedParametersThatItHoldsOnce) {
  const TemporaryFolder folder;
  on_workers(2, 1, [&](Worker& worker) { train_pipeline(worker, folder.path(), {2, 3}, 0, 3, true); });
  const std::vector<std::string> names = Checkpoint::newest(folder.path()).names();
  EXPECT_THAT(names, ::testing::Contains(HasSubstr("layers.0.weight")).Times(::testing::Ge(1)));
  EXPECT_THAT(names, ::testing::Not(::testing::Contains(HasSubstr("layers.4.weight"))));
  on_workers(3, 2, [&](Worker& worker) { train_pipeline(worker, folder.path(), {1, 1, 3}, 3, 5, true); });
  on_workers(2, 3, [&](Worker& worker) { train_pipeline(worker, folder.path(), {4, 1}, 5, 7, true); });
  ::testing::internal::CaptureStderr();
  on_workers(1, 4, [&](Worker& worker) { train_pipeline(worker, folder.path(), {5}, 7, 8, true); });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::Not(HasSubstr("which no rank has registered")));
}

TEST(Resharding, ContinuesReplicasOfAPipelineWhoseStateItHoldsOnce) {
  const TemporaryFolder one_replica, folder;
  on_workers(2, 1, [&](Worker& worker) { train_pipeline(worker, one_replica.path(), {2, 3}, 0, 3, true); });
  on_workers(4, 1, [&](Worker& worker) { train_pipeline(worker, folder.path(), {2, 3}, 0, 3, true, 2); });
  EXPECT_EQ(names_in(folder.path()), names_in(one_replica.path()));
  on_workers(3, 2, [&](Worker& worker) { train_pipeline(worker, folder.path(), {1, 1, 3}, 3, 5, true); });
  on_workers(6, 3, [&](Worker& worker) { train_pipeline(worker, folder.path(), {1, 3, 1}, 5, 7, true, 2); });
}

/// The first layer's weights and the losses of a training.
struct Trained {
  std::vector<double> losses;
  at::Tensor weight;
};

/// Trains a pipeline with dropout from its newest checkpoint, if the folder has one, to `last` steps. Saves after every
/// third step and then evaluates. Without a folder it does not stop in between.
void train_with_dropout(Worker& worker, const std::string& folder, const std::vector<int>& balance,
                        std::int64_t last, Trained& trained) {
  pipeline::Layers layers;
  for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
    layers.add<Dense>(layer);
    layers.add<torch::nn::Dropout>(0.3);
  }
  pipeline::Pipeline pipe(worker, layers, {.balance = balance, .micro_batches = 2, .seed = 11});
  optim::Optimizer optimizer(
      {optim::ParamGroup(pipe.parameters(), optim::Adam{.lr = 0.01}, parameter_names(pipe))});
  CheckpointManager manager(worker, {.directory = folder});
  manager.add("pipe", pipe);
  manager.add("optimizer", optimizer);
  for (std::int64_t step = manager.restore_or(0); step < last; ++step) {
    const at::Tensor rows = numbers({6, kWidth}, 100 + static_cast<std::uint64_t>(step));
    optimizer.zero_grad();
    const double loss = pipe.train_step(rows, rows, mean_square);
    if (worker.rank() == 0) trained.losses.push_back(loss);
    optimizer.step();
    if ((step + 1) % 3 != 0) continue;
    manager.save(step + 1);
    pipe.eval();
    pipe.infer(rows);
    pipe.train();
  }
  manager.wait();
  if (const auto module = pipe.module(0)) trained.weight = module->parameters()[0].detach().clone();
}

TEST(Resharding, ContinuesDropoutWithASeedAsWithoutAnInterruption) {
  const TemporaryFolder straight, interrupted, resharded;
  Trained expected, same, other;
  const std::vector<int> two{5, 5}, three{2, 3, 5};
  on_workers(2, 1, [&](Worker& worker) { train_with_dropout(worker, straight.path(), two, 9, expected); });
  ASSERT_EQ(expected.losses.size(), 9u);
  for (const std::int64_t last : {3, 6, 9})
    on_workers(2, 1,
               [&](Worker& worker) { train_with_dropout(worker, interrupted.path(), two, last, same); });
  EXPECT_EQ(same.losses, expected.losses) << "bit for bit";
  EXPECT_TRUE(at::equal(same.weight, expected.weight));
  on_workers(2, 1, [&](Worker& worker) { train_with_dropout(worker, resharded.path(), two, 3, other); });
  on_workers(3, 1, [&](Worker& worker) { train_with_dropout(worker, resharded.path(), three, 6, other); });
  on_workers(1, 1, [&](Worker& worker) { train_with_dropout(worker, resharded.path(), {10}, 9, other); });
  ASSERT_EQ(other.losses.size(), 9u);
  for (std::size_t step = 0; step < 9; ++step) EXPECT_NEAR(other.losses[step], expected.losses[step], 1e-12);
  EXPECT_TRUE(at::allclose(other.weight, expected.weight, 1e-10, 1e-12));
}

TEST(Resharding, LoadsPipelinesOfCheckpointsThatLackTheirNumberOfSteps) {
  const TemporaryFolder folder;
  on_workers(1, 1, [&](Worker& worker) {
    Dense saved(3);
    CheckpointManager manager(worker, {.directory = folder.path()});
    manager.add("pipe.layers.0", saved);  // as earlier releases saved a pipeline
    manager.save(4);
    manager.wait();
    pipeline::Layers layers;
    layers.add<Dense>(4u);
    pipeline::Pipeline pipe(worker, layers, {.balance = {1}, .seed = 1});
    pipe.set_training_steps(2);
    CheckpointManager later(worker, {.directory = folder.path(), .name = "later"});
    later.add("pipe", pipe);
    EXPECT_EQ(later.restore(), 4);
    EXPECT_TRUE(at::equal(pipe.module(0)->parameters()[0], saved->weight));
    EXPECT_EQ(pipe.training_steps(), 2u);
  });
}

TEST(Resharding, RefusesAPipelineWithABatchInFlight) {
  const TemporaryFolder folder;
  on_workers(2, 1, [&](Worker& worker) {
    pipeline::Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    pipeline::Pipeline pipe(worker, layers, {.balance = {1, 1}, .staleness = 1});
    CheckpointManager manager(worker, {.directory = folder.path()});
    manager.add("pipe", pipe);
    manager.save(1);
    manager.wait();
    const at::Tensor rows = numbers({6, kWidth}, 1);
    pipe.train_step(rows, rows, mean_square);
    const auto refusal = AllOf(HasSubstr("in flight"), HasSubstr("call finish() on all workers"));
    EXPECT_THAT(invalid_text([&] { manager.save(2); }), refusal);
    EXPECT_THAT(invalid_text([&] { manager.restore(); }), refusal);
    pipe.finish();
    EXPECT_EQ(manager.restore(), 1);
  });
}

/// A table of which each rank owns some consecutive rows.
class ShardedTable final : public StateSource {
 public:
  ShardedTable(int rank, int ranks, std::int64_t rows) : rows_(rows) {
    begin_ = rows * rank / ranks;
    shard = at::zeros({rows * (rank + 1) / ranks - begin_, 3}, at::kDouble);
  }
  void fill() {
    for (std::int64_t row = 0; row < shard.size(0); ++row)
      shard[row].fill_(static_cast<double>(begin_ + row));
  }
  bool is_right() const {
    for (std::int64_t row = 0; row < shard.size(0); ++row) {
      if (!shard[row].eq(static_cast<double>(begin_ + row)).all().item<bool>()) return false;
    }
    return true;
  }
  void save(StateWriter& writer) const override { writer.add_shard("rows", shard, {rows_, 3}, {begin_, 0}); }
  void load(const StateReader& reader) override { reader.read_shard_into("rows", shard, {begin_, 0}); }

  at::Tensor shard;

 private:
  const std::int64_t rows_;
  std::int64_t begin_ = 0;
};

/// Hands another object's state to a manager.
class Forward final : public StateSource {
 public:
  explicit Forward(StateSource& source) : source_(source) {}
  void save(StateWriter& writer) const override { source_.save(writer); }
  void load(const StateReader& reader) override { source_.load(reader); }

 private:
  StateSource& source_;
};

TEST(Resharding, RestoresTheShardsOfAnyNumberOfOwnersWithAnyOther) {
  for (const int owners : {4, 1, 3}) {
    const TemporaryFolder folder;
    on_workers(owners, 1, [&](Worker& worker) {
      ShardedTable table(worker.rank(), owners, 11);
      table.fill();
      CheckpointManager manager(worker, {.directory = folder.path()});
      manager.add_source("table", std::make_unique<Forward>(table));
      manager.save(1);
      manager.wait();
    });
    for (const int readers : {2, 5, 1}) {
      on_workers(readers, 1, [&](Worker& worker) {
        ShardedTable table(worker.rank(), readers, 11);
        CheckpointManager manager(worker, {.directory = folder.path()});
        manager.add_source("table", std::make_unique<Forward>(table));
        EXPECT_EQ(manager.restore(), 1);
        EXPECT_TRUE(table.is_right()) << owners << " owners, " << readers << " readers";
      });
    }
  }
}

TEST(Replicas, AreWrittenOnceAndRestoredByAnyNumberOfRanks) {
  const TemporaryFolder folder;
  const auto program = [&](int ranks, bool first) {
    on_workers(ranks, 1, [&](Worker& worker) {
      Dense model(first ? 1 : 50);
      std::int64_t epoch = first ? 7 : 0;
      std::int64_t mine = worker.rank();
      CheckpointManager manager(worker, {.directory = folder.path()});
      manager.add("model", model);
      manager.add("epoch", epoch);
      if (ranks == 3) manager.add_per_rank("mine", mine);
      if (first) {
        manager.save(4);
        manager.wait();
        return;
      }
      mine = -1;
      EXPECT_EQ(manager.restore(), 4);
      EXPECT_TRUE(model->weight.equal(Dense(1)->weight));
      EXPECT_EQ(epoch, 7);
      EXPECT_EQ(mine, ranks == 3 ? worker.rank() : -1);
    });
  };
  program(3, true);
  program(3, false);
  program(1, false);
  program(5, false);
  const auto bytes = [&](int file) {
    return std::filesystem::file_size(
        fmt::format("{}/step-00000004/model-0000{}-of-00003.safetensors", folder.path(), file));
  };
  EXPECT_GT(bytes(1), bytes(2)) << "only the first rank writes the model; each writes its generator";
}

TEST(Replicas, ThatDisagreeAreAnErrorOnAllRanks) {
  const TemporaryFolder folder;
  on_workers(2, 1, [&](Worker& worker) {
    at::Tensor x = at::zeros({2 + worker.rank()});
    std::int64_t epoch = worker.rank();
    CheckpointManager shapes(worker, {.directory = folder.path() + "/shapes", .name = "shapes"});
    shapes.add("x", x);
    EXPECT_THAT(
        invalid_text([&] { shapes.save(1); }),
        AllOf(HasSubstr("rank 0 ('worker0') saves 'x' with shape [2]"), HasSubstr("rank 1 ('worker1')")));
    CheckpointManager values(worker, {.directory = folder.path() + "/values", .name = "values"});
    values.add("epoch", epoch);
    EXPECT_THAT(invalid_text([&] { values.save(1); }), HasSubstr("the value 'epoch' differs between rank 0"));
    CheckpointManager steps(worker, {.directory = folder.path() + "/steps", .name = "steps"});
    EXPECT_THAT(invalid_text([&] { steps.save(10 + worker.rank()); }),
                HasSubstr("saves step 10, but rank 1"));
    steps.save(12);
    steps.wait();
    at::Tensor undefined = worker.rank() == 1 ? at::Tensor() : at::zeros({1});
    CheckpointManager one(worker, {.directory = folder.path() + "/one", .name = "one"});
    one.add("y", undefined);
    EXPECT_THAT(error_of([&] { one.save(1); }).message(),
                HasSubstr("rank 1 ('worker1'): the tensor 'y' is undefined"));
  });
}

TEST(Replicas, PerRankStateNeedsTheSameNumberOfRanks) {
  const TemporaryFolder folder;
  const auto program = [&](int ranks, bool first) {
    on_workers(ranks, 1, [&](Worker& worker) {
      std::int64_t mine = worker.rank();
      CheckpointManager manager(worker, {.directory = folder.path()});
      manager.add_per_rank("mine", mine);
      if (first) return manager.save(1);
      EXPECT_THAT(invalid_text([&] { manager.restore(); }),
                  HasSubstr("'mine' was saved per rank by 2 ranks"));
    });
  };
  program(2, true);
  program(3, false);
}

}  // namespace torchspan::checkpoint::resharding_test
