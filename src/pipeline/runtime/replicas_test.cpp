// Data parallelism × pipelines: replicas of a pipeline against one process that computes all batches together.
// peer: pipelining `manual_with_data_parallel`: better: uneven batches, tied parameters and split backwards as well
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include <torchspan/pipeline/deferred_batch_norm.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::replicas_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::pipeline_cluster;
using torchspan::testing::SimCluster;

/// Multiplies by a transposed matrix, as the last layer of a language model does.
struct OutputImpl : torch::nn::Module {
  OutputImpl() { weight = register_parameter("weight", at::zeros({kWidth, kWidth}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Output);

/// Dense layers, the last of which is tied to the first if `tied`.
Layers dense_layers(int stages, bool tied) {
  Layers layers;
  const auto first = layers.add<Dense>(1u);
  for (int layer = 1; layer + (tied ? 1 : 0) < stages; ++layer)
    layers.add<Dense>(static_cast<std::uint64_t>(layer) + 1);
  if (tied) layers.tie({{first, "weight"}, {layers.add<Output>(), "weight"}});
  return layers;
}

/// The same in one process.
struct DenseTwins {
  DenseTwins(int stages, bool ties) : tied(ties) {
    for (int layer = 0; layer + (tied ? 1 : 0) < stages; ++layer)
      dense.emplace_back(static_cast<std::uint64_t>(layer) + 1);
  }
  at::Tensor forward(at::Tensor x) {
    for (Dense& layer : dense) x = layer->forward(x);
    return tied ? at::matmul(x, dense[0]->weight.t()) : x;
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const Dense& layer : dense) {
      for (const at::Tensor& parameter : layer->parameters()) all.push_back(parameter);
    }
    return all;
  }
  /// The modules by layer of the pipeline.
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const {
    std::vector<std::shared_ptr<torch::nn::Module>> all;
    for (const Dense& layer : dense) all.push_back(layer.ptr());
    if (tied) all.push_back(nullptr);
    return all;
  }
  bool tied;
  std::vector<Dense> dense;
};

struct Case {
  int replicas = 2;
  int stages = 2;
  bool tied = false;
  int stages_per_worker = 1;
};

PipelineOptions with_replicas(PipelineOptions options, const Case& shape) {
  options.balance.assign(static_cast<std::size_t>(shape.stages), 1);
  options.replicas = shape.replicas;
  return options;
}

/// The rows of a replica in a step: they differ, and a small batch has fewer micro-batches.
std::int64_t rows_of(int replica, std::uint64_t step) {
  return 1 + (static_cast<std::int64_t>(step) * 3 + replica * 5) % 8;
}

at::Tensor batch_of(int replica, std::uint64_t step, std::uint64_t what) {
  return seeded({rows_of(replica, step), kWidth}, what + 100 * step + static_cast<std::uint64_t>(replica));
}

at::Tensor batch_of_all(int replicas, std::uint64_t step, std::uint64_t what) {
  std::vector<at::Tensor> all;
  for (int replica = 0; replica < replicas; ++replica) all.push_back(batch_of(replica, step, what));
  return at::cat(all);
}

/// The values of all parameters and gradients of a worker, as bytes.
Bytes bits_of(const Pipeline& pipe) {
  Bytes bytes;
  for (const at::Tensor& parameter : pipe.parameters()) {
    for (const at::Tensor& tensor : {parameter.detach(), parameter.grad()}) {
      if (!tensor.defined()) continue;
      const at::Tensor plain = tensor.to_dense().contiguous();
      const auto* data = static_cast<const std::byte*>(plain.data_ptr());
      bytes.insert(bytes.end(), data, data + plain.nbytes());
    }
  }
  return bytes;
}

void expect_training_like_one_process(const Case& shape, const PipelineOptions& options, bool clips) {
  const int workers = shape.replicas * shape.stages / shape.stages_per_worker;
  std::vector<Bytes> bits(static_cast<std::size_t>(workers));
  on_workers(workers, 1, [&](Worker& worker) {
    Pipeline pipe(worker, dense_layers(shape.stages, shape.tied), with_replicas(options, shape));
    DenseTwins twins(shape.stages, shape.tied);
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD plain(twins.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (std::uint64_t step = 0; step < 4; ++step) {
      const double loss =
          pipe.train_step(batch_of(pipe.replica(), step, 1), batch_of(pipe.replica(), step, 50), mean_square);
      const at::Tensor expected = mean_square(twins.forward(batch_of_all(shape.replicas, step, 1)),
                                              batch_of_all(shape.replicas, step, 50));
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
      expect_gradients(pipe, twins.modules());
      if (step % 2 == 0) continue;  // gradients of two steps add up
      if (clips) {
        EXPECT_NEAR(pipe.clip_grad_norm(0.05), torch::nn::utils::clip_grad_norm_(twins.parameters(), 0.05),
                    1e-12);
      }
      optimizer.step();
      plain.step();
      bits[worker.rank()] = bits_of(pipe);
      optimizer.zero_grad();
      plain.zero_grad();
    }
  });
  const std::size_t each = bits.size() / static_cast<std::size_t>(shape.replicas);
  for (std::size_t rank = each; rank < bits.size(); ++rank)
    EXPECT_EQ(bits[rank], bits[rank % each]) << "rank " << rank;
}

TEST(Replicas, TrainLikeOneProcessUnderEverySchedule) {
  in_every_way([](const PipelineOptions& options) {
    for (const Case& shape : {Case{2, 2, false}, Case{2, 2, true}, Case{3, 2, true}}) {
      SCOPED_TRACE(fmt::format("{} x {}", shape.replicas, shape.stages));
      expect_training_like_one_process(shape, options, shape.tied);
    }
  });
}

TEST(Replicas, TrainLikeOneProcessInLargerGrids) {
  for (const Case& shape : {Case{2, 1}, Case{4, 1}, Case{8, 2, true}, Case{2, 8, true}, Case{4, 4, true}}) {
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZBH1, Schedule::kZBH2}) {
      SCOPED_TRACE(
          fmt::format("{} x {}, schedule {}", shape.replicas, shape.stages, static_cast<int>(schedule)));
      expect_training_like_one_process(shape, {.micro_batches = 4, .schedule = schedule}, true);
    }
  }
}

TEST(Replicas, TrainLikeOneProcessWithSeveralStagesOnAWorker) {
  for (const Schedule schedule :
       {Schedule::kInterleaved, Schedule::kZB1P, Schedule::kZBV, Schedule::kDualPipeV}) {
    SCOPED_TRACE(static_cast<int>(schedule));
    expect_training_like_one_process({2, 4, true, 2}, {.micro_batches = 4, .schedule = schedule}, true);
  }
}

TEST(Replicas, SeeOtherRandomNumbersThanEachOther) {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add_function("drop", [](const at::Tensor& x) { return drop(x); });
  layers.add<Dense>(2u);
  layers.add<Dense>(3u);
  on_workers(4, 1, [&](Worker& worker) {
    const PipelineOptions common{.balance = {2, 2}, .micro_batches = 2, .seed = 9};
    PipelineOptions split = common, alone = common;
    split.replicas = 2;
    Pipeline pipe(worker, layers, split);
    alone.workers = {worker.name(), worker.name()};
    alone.micro_batches = 4;
    Pipeline whole(worker, layers, alone);
    const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, 4 * pipe.replica(), 4); };
    for (int step = 0; step < 2; ++step) {
      EXPECT_NEAR(pipe.train_step(part(x), part(y), mean_square), whole.train_step(x, y, mean_square), 1e-12);
    }
    for (int layer = 0; layer < 4; ++layer) {
      const auto mine = pipe.module(layer);
      if (!mine) continue;
      expect_close(mine->parameters()[0].grad(), whole.module(layer)->parameters()[0].grad());
    }
  });
}

TEST(Replicas, CommitTheBatchStatisticsOfAllBatches) {
  std::vector<Bytes> bits(4);
  on_workers(4, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<DeferredBatchNorm>(torch::nn::BatchNormOptions(kWidth).momentum(0.1));
    layers.add_function("twice", [](const at::Tensor& x) { return x * 2; });
    Pipeline pipe(worker, layers, {.balance = {1, 1}, .replicas = 2, .micro_batches = 2});
    if (const auto module = pipe.module(0)) module->to(at::kDouble);
    DeferredBatchNorm plain(torch::nn::BatchNormOptions(kWidth).momentum(0.1));
    plain->to(at::kDouble);
    for (std::uint64_t step = 1; step < 4; ++step) {
      const at::Tensor all = seeded({10, kWidth}, step), y = at::zeros({10, kWidth}, at::kDouble);
      const auto part = [&](const at::Tensor& rows) {  // 6 in micro-batches of 2 rows or more, and 4
        return pipe.replica() == 0 ? rows.narrow(0, 0, 6) : rows.narrow(0, 6, 4);
      };
      if (step == 2) {
        const Batch output = pipe.forward(part(all));
        if (output.size() > 0) output.tensor().sum().backward();
        pipe.backward();
      } else {
        pipe.train_step(part(all), part(y), mean_square);
      }
      plain->forward(all);
      if (const auto module = pipe.module(0)) {
        const auto buffers = module->named_buffers();
        expect_close(buffers["running_mean"], plain->running_mean);
        expect_close(buffers["running_var"], plain->running_var);
        EXPECT_EQ(buffers["num_batches_tracked"].item<std::int64_t>(), static_cast<std::int64_t>(step));
        const at::Tensor mean = buffers["running_mean"].contiguous();
        const auto* data = static_cast<const std::byte*>(mean.data_ptr());
        bits[worker.rank()] = Bytes(data, data + mean.nbytes());
      }
    }
  });
  EXPECT_FALSE(bits[0].empty());
  EXPECT_EQ(bits[0], bits[2]);
}

TEST(Replicas, WorkWithForwardAndBackwardApart) {
  on_workers(4, 1, [](Worker& worker) {
    const Case shape{2, 2, true};
    Pipeline pipe(worker, dense_layers(2, true), with_replicas({.micro_batches = 2}, shape));
    DenseTwins twins(2, true);
    const Batch output = pipe.forward(batch_of(pipe.replica(), 3, 1));
    if (output.size() > 0) mean_square(output.tensor(), batch_of(pipe.replica(), 3, 50)).backward();
    pipe.backward();
    mean_square(twins.forward(batch_of_all(2, 3, 1)), batch_of_all(2, 3, 50)).backward();
    expect_gradients(pipe, twins.modules());
  });
}

TEST(Replicas, EvaluateTheirOwnBatches) {
  on_workers(4, 1, [](Worker& worker) {
    Pipeline pipe(worker, dense_layers(2, false), with_replicas({.micro_batches = 2}, {2, 2}));
    DenseTwins twins(2, false);
    const torch::NoGradGuard no_grad;
    const at::Tensor mine = batch_of(pipe.replica(), 3, 1);
    const Batch output = pipe.infer(mine);
    EXPECT_EQ(output.size(), worker.rank() % 2 == 1 ? 1u : 0u);
    if (output.size() > 0) expect_close(output.tensor(), twins.forward(mine));
    const double loss = pipe.train_step(mine, batch_of(pipe.replica(), 3, 50), mean_square);
    const at::Tensor expected = mean_square(twins.forward(batch_of_all(2, 3, 1)), batch_of_all(2, 3, 50));
    EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
    for (const at::Tensor& parameter : pipe.parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST(Replicas, BeginWithTheValuesOfReplicaZero) {
  on_workers(4, 1, [](Worker& worker) {
    const auto seed = static_cast<std::uint64_t>(worker.rank() / 2) * 10 + 1;
    Layers layers;
    layers.add_existing(Dense(seed));
    layers.add_existing(Dense(seed + 1));
    Pipeline pipe(worker, layers, with_replicas({}, {2, 2}));
    DenseTwins twins(2, false);
    const auto stage = static_cast<std::size_t>(worker.rank() % 2);
    EXPECT_TRUE(at::equal(pipe.parameters()[0], twins.dense[stage]->weight));
    EXPECT_TRUE(at::equal(pipe.parameters()[1], twins.dense[stage]->bias));
  });
}

/// Rows of a table with sparse gradients, plus a parameter that only some replicas use and one that none uses.
struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    table = register_parameter("table", seeded({6, kWidth}, 5));
    sometimes = register_parameter("sometimes", seeded({kWidth}, 6));
    never = register_parameter("never", seeded({kWidth}, 7));
  }
  at::Tensor forward(const at::Tensor& rows) {
    at::Tensor found = at::embedding(table, rows, -1, false, /*sparse=*/true);
    return rows.max().item<std::int64_t>() > 3 ? found + sometimes : found;
  }
  at::Tensor table, sometimes, never;
};
TORCH_MODULE(Lookup);

TEST(Replicas, ReduceSparseAndUnusedGradients) {
  on_workers(4, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Lookup>();
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, with_replicas({.micro_batches = 2}, {2, 2}));
    const at::Tensor rows[] = {at::tensor({1, 2, 3, 3}, at::kLong), at::tensor({0, 3, 5, 4}, at::kLong)};
    const at::Tensor y = seeded({8, kWidth}, 4);
    for (int step = 0; step < 2; ++step)
      pipe.train_step(rows[pipe.replica()], y.narrow(0, 4 * pipe.replica(), 4), mean_square);
    Lookup lookup;
    Dense dense(2u);
    for (int step = 0; step < 2; ++step) {
      // By micro-batch of two rows: whether `sometimes` is used depends on it.
      for (int part = 0; part < 4; ++part) {
        const at::Tensor x = rows[part / 2].narrow(0, 2 * (part % 2), 2);
        (mean_square(dense->forward(lookup->forward(x)), y.narrow(0, 2 * part, 2)) / 4).backward();
      }
    }
    if (worker.rank() % 2 == 1) return;
    const auto ours = pipe.module(0)->named_parameters();
    EXPECT_TRUE(ours["table"].grad().is_sparse());
    expect_close(ours["table"].grad().to_dense(), lookup->table.grad().to_dense());
    expect_close(ours["sometimes"].grad(), lookup->sometimes.grad());
    EXPECT_FALSE(ours["never"].grad().defined());
  });
}

/// Calls a function in each backward.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t function) {
    context->saved_data["function"] = function;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["function"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

TEST(Replicas, SendAStagesGradientsAfterItsLastMicroBatchWhileOtherStagesRun) {
  on_workers(2, 1, [](Worker& worker) {
    std::vector<bool> taken;  // whether the second stage's gradients were sent, at each backward of the first
    Pipeline* pipe = nullptr;
    std::function<void()> look = [&] { taken.push_back(!pipe->module(1)->parameters()[0].grad().defined()); };
    Layers layers;
    layers.add_function("probe", [&look](const at::Tensor& x) {
      return Probe::apply(x, reinterpret_cast<std::int64_t>(&look));
    });
    layers.add<Dense>(1u);
    // Both stages of a replica are on one worker; the first runs its backward after the second.
    const std::string a = "worker0", b = "worker1";
    Pipeline local(worker, layers,
                   {.balance = {1, 1},
                    .workers = {a, a, b, b},
                    .replicas = 2,
                    .micro_batches = 3,
                    .schedule = Schedule::k1F1B,
                    .checkpoint = ActivationCheckpoint::kNever});
    pipe = &local;
    const at::Tensor x = seeded({6, kWidth}, 3).requires_grad_(true);
    local.train_step(x, seeded({6, kWidth}, 4), mean_square);
    EXPECT_THAT(taken, ElementsAre(false, false, true));
  });
}

/// Throws in the forward of an armed worker.
struct ArmedImpl : torch::nn::Module {
  ArmedImpl(const bool* flag, std::uint64_t seed) : armed(flag) {
    weight = register_parameter("weight", seeded({kWidth, kWidth}, seed));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (*armed) throw std::runtime_error("the layer broke");
    return at::matmul(x, weight);
  }
  const bool* armed;
  at::Tensor weight;
};
TORCH_MODULE(Armed);

TEST(Replicas, AllEndAStepThatFailsOnOneWorkerAndTheNextWorks) {
  for (int victim = 0; victim < 4; ++victim) {
    std::vector<std::string> texts(4);
    on_workers(4, 1, [&](Worker& worker) {
      bool armed = false;
      Layers layers;
      layers.add<Armed>(&armed, 1u);
      layers.add<Armed>(&armed, 2u);
      Pipeline pipe(worker, layers, with_replicas({.micro_batches = 3}, {2, 2}));
      const auto step = [&] {
        return pipe.train_step(batch_of(pipe.replica(), 2, 1), batch_of(pipe.replica(), 2, 50), mean_square);
      };
      const double loss = step();
      const at::Tensor before = pipe.parameters()[0].grad().clone();
      armed = worker.rank() == victim;
      texts[worker.rank()] = error_text(step);
      expect_close(pipe.parameters()[0].grad(), before);
      armed = false;
      EXPECT_EQ(step(), loss);
      expect_close(pipe.parameters()[0].grad(), 2 * before);
    });
    for (const std::string& text : texts) {
      EXPECT_THAT(text, AllOf(HasSubstr("the layer broke"), HasSubstr(fmt::format("worker{}", victim))));
      EXPECT_EQ(text, texts[0]);
    }
  }
}

TEST(Replicas, NameADeadWorkerAndItsReplica) {
  for (int victim = 1; victim < 4; ++victim) {
    auto options = pipeline_cluster(4);
    options.graceful = false;
    SimCluster world(options);
    std::vector<std::string> texts(4);
    world.try_services([&](rpc::WorkerService& service) {
      Worker& worker = service.worker();
      worker.runtime().log.set_level(LogLevel::kOff);
      Pipeline pipe(worker, dense_layers(2, false), with_replicas({.micro_batches = 3}, {2, 2}));
      const auto step = [&] {
        pipe.train_step(batch_of(pipe.replica(), 2, 1), batch_of(pipe.replica(), 2, 50), mean_square);
      };
      step();
      if (worker.rank() == victim) {
        worker.runtime().executor.sleep(std::chrono::milliseconds(100));  // its last messages arrive
        world.kill(victim);
        return;
      }
      texts[worker.rank()] = error_text(step);
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(
          texts[static_cast<std::size_t>(rank)],
          HasSubstr(fmt::format("worker 'worker{0}' (rank {0}), which owns stage {1} of replica {2}, is "
                                "unreachable",
                                victim, victim % 2, victim / 2)));
    }
  }
}

TEST(Replicas, NameALateReplica) {
  std::vector<std::string> texts(4);
  on_workers(4, 1, [&](Worker& worker) {
    Pipeline pipe(worker, dense_layers(2, false),
                  with_replicas({.stall_timeout = std::chrono::seconds(2)}, {2, 2}));
    if (pipe.replica() == 1) worker.runtime().executor.sleep(std::chrono::seconds(20));
    texts[worker.rank()] = error_text([&] {
      pipe.train_step(batch_of(pipe.replica(), 2, 1), batch_of(pipe.replica(), 2, 50), mean_square);
    });
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, AllOf(ContainsRegex("stalled: worker 'worker[23]' has not begun the step"),
                            ContainsRegex("'worker[01]' waits for the gradients of the other replicas")));
}

TEST(Replicas, MustCallTheSameFunctions) {
  on_workers(4, 1, [&](Worker& worker) {
    Pipeline pipe(worker, dense_layers(2, false), with_replicas({}, {2, 2}));
    const at::Tensor x = batch_of(pipe.replica(), 2, 1), y = batch_of(pipe.replica(), 2, 50);
    EXPECT_THAT(error_text([&] {
                  if (pipe.replica() == 0) pipe.infer(x);
                  pipe.train_step(x, y, mean_square);
                }),
                HasSubstr("the replicas of pipeline 'pipeline' call different functions in step 0"));
  });
}

std::string refusal(int workers, const PipelineOptions& options) {
  std::vector<std::string> texts(static_cast<std::size_t>(workers));
  on_workers(workers, 1, [&](Worker& worker) {
    texts[worker.rank()] = error_text([&] { Pipeline pipe(worker, dense_layers(2, false), options); });
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

TEST(Replicas, ThatDoNotFitTheWorkersAreRefusedOnAll) {
  EXPECT_THAT(refusal(2, {.balance = {1, 1}, .replicas = 0}),
              HasSubstr("replicas is 0; it must be 1 or more"));
  EXPECT_THAT(
      refusal(2, {.balance = {1, 1}, .workers = {"worker0", "worker1", "worker0"}, .replicas = 2}),
      HasSubstr("replicas is 2, with 2 stages each: that takes the owners of 4 stages, but there are 3"));
  EXPECT_THAT(
      refusal(2, {.balance = {1, 1}, .workers = {"worker0", "worker1", "worker1", "worker0"}, .replicas = 2}),
      HasSubstr("'worker1' owns a stage of replica 0 and one of replica 1"));
  EXPECT_THAT(
      refusal(3, {.balance = {1, 1}, .workers = {"worker0", "worker0", "worker1", "worker2"}, .replicas = 2}),
      HasSubstr("replica 1 places stage 1 on 'worker2', which does not match replica 0"));
}

TEST(Replicas, WithDifferentLayersAreRefusedOnAll) {
  std::vector<std::string> texts(4);
  on_workers(4, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<torch::nn::Linear>(2, worker.rank() < 2 ? 2 : 3);
    layers.add<torch::nn::Linear>(2, 2);
    texts[worker.rank()] = error_text([&] { Pipeline pipe(worker, layers, with_replicas({}, {2, 2})); });
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, AllOf(HasSubstr("have different layers"), HasSubstr("'weight' of layer 0")));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::replicas_test
