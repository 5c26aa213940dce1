#include <gmock/gmock.h>
#include <map>
#include <set>

#include <torch/torch.h>

#include <torchspan/pipeline.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::checkpoint_layers_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A Dense that counts its forwards.
struct CountedDenseImpl : torch::nn::Module {
  CountedDenseImpl(std::uint64_t seed, std::map<std::uint64_t, int>* forwards)
      : number(seed), count(forwards), dense(register_module("dense", Dense(seed))) {}
  at::Tensor forward(const at::Tensor& x) {
    ++(*count)[number];
    return dense->forward(x);
  }
  std::uint64_t number;
  std::map<std::uint64_t, int>* count;
  Dense dense;
};
TORCH_MODULE(CountedDense);

constexpr int kLayers = 7;

/// A layer of each kind: the first and the last are tied, the first is used again, one stashes what another pops.
Layers mixed_model(std::map<std::uint64_t, int>& forwards) {
  Layers layers;
  const auto first = layers.add<CountedDense>(1u, &forwards);
  const auto earlier = first;
  layers
      .add_function("stash",
                    [](const at::Tensor& x, Skips& skips) {
                      skips.stash("kept", x * 2);
                      return at::sin(x);
                    })
      .stashes("kept");
  layers.add_function("drop", [](const at::Tensor& x) { return drop(x); });
  DeferredBatchNorm norm(kWidth);
  norm->to(at::kDouble);
  layers.add_existing(norm);
  layers.reuse(earlier);
  layers.add<CountedDense>(2u, &forwards);
  layers.add_function("pop", [](const at::Tensor& x, Skips& skips) { return x * skips.pop("kept"); })
      .pops("kept");
  const auto last = layers.add<CountedDense>(3u, &forwards);
  layers.tie({{earlier, "dense.weight"}, {last, "dense.weight"}});
  return layers;
}

struct Result {
  std::map<std::string, at::Tensor> values;  ///< gradients, buffers, losses, by name
  std::map<std::uint64_t, int> forwards;     ///< by layer
  double drawn = 0;                          ///< the next number of LibTorch's generator
};

Result train(PipelineOptions options, int workers) {
  Result result;
  torch::manual_seed(11);
  on_workers(workers, 1, [&](Worker& worker) {
    options.micro_batches = 3;
    if (options.balance.empty()) options.balance = workers == 1 ? std::vector{kLayers} : std::vector{4, 3};
    Pipeline pipe(worker, mixed_model(result.forwards), options);
    for (int step = 0; step < 2; ++step) {
      const double loss = pipe.train_step(seeded({9, kWidth}, 3), seeded({9, kWidth}, 4), mean_square);
      if (worker.rank() == 0)
        result.values["loss" + std::to_string(step)] = at::scalar_tensor(loss, at::kDouble);
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto module = pipe.module(layer);
      if (!module) continue;
      for (const auto& parameter : module->named_parameters())
        result.values[std::to_string(layer) + parameter.key()] = parameter.value().grad();
      for (const auto& buffer : module->named_buffers())
        result.values[std::to_string(layer) + buffer.key()] = buffer.value();
    }
  });
  result.drawn = at::rand({1}, at::kDouble).item<double>();
  return result;
}

void expect_same_bits(const Result& ours, const Result& expected) {
  ASSERT_EQ(ours.values.size(), expected.values.size());
  for (const auto& [name, value] : expected.values)
    EXPECT_TRUE(ours.values.at(name).equal(value)) << name << "\n" << ours.values.at(name) << value;
}

PipelineOptions with(Schedule schedule) {
  PipelineOptions options;
  options.schedule = schedule;
  return schedule == Schedule::kCustom ? with_split_backwards(options) : options;
}

/// All selections of layers, as numbers of bits.
std::vector<int> selected(int bits) {
  std::vector<int> layers;
  for (int layer = 0; layer < kLayers; ++layer) {
    if ((bits >> layer & 1) != 0) layers.push_back(layer);
  }
  return layers;
}

TEST(PipelineCheckpointLayers, GiveTheSameBitsWhateverIsSelected) {
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::k1F1B, Schedule::kCustom}) {
    PipelineOptions options = with(schedule);
    options.seed = 5;
    options.checkpoint = ActivationCheckpoint::kNever;
    const Result none = train(options, 2);
    ASSERT_GT(none.values.size(), 8u);
    for (int bits = 0; bits < 1 << kLayers; bits += schedule == Schedule::k1F1B ? 3 : 9) {
      SCOPED_TRACE(::testing::Message() << "schedule " << static_cast<int>(schedule) << ", layers " << bits);
      options.checkpoint = bits % 2 == 0 ? ActivationCheckpoint::kAlways : ActivationCheckpoint::kExceptLast;
      options.checkpoint_layers = selected(bits);
      expect_same_bits(train(options, 2), none);
      if (HasFailure()) return;
    }
  }
}

TEST(PipelineCheckpointLayers, DrawTheNumbersOfTheGeneratorOnceWithoutASeed) {
  for (const Schedule schedule : {Schedule::kGPipe, Schedule::kCustom}) {
    PipelineOptions options = with(schedule);
    options.checkpoint = ActivationCheckpoint::kNever;
    const Result none = train(options, 1);
    options.checkpoint = ActivationCheckpoint::kAlways;
    for (const int bits : {4, 5, 12, 21, 68, 127}) {
      options.checkpoint_layers = selected(bits);
      const Result some = train(options, 1);
      expect_same_bits(some, none);
      EXPECT_EQ(some.drawn, none.drawn);
    }
  }
}

/// The weights of three layers after four overlapping steps, each with an update.
std::vector<at::Tensor> trained_with_overlap(ActivationCheckpoint checkpoint,
                                             const std::vector<int>& selection) {
  std::vector<at::Tensor> weights(3);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    for (std::uint64_t layer = 0; layer < 3; ++layer) layers.add<Dense>(layer + 1);
    PipelineOptions options;
    options.balance = {2, 1};
    options.micro_batches = 3;
    options.staleness = 1;
    options.checkpoint = checkpoint;
    options.checkpoint_layers = selection;
    Pipeline pipe(worker, layers, options);
    const auto update = [&pipe] {
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : pipe.parameters()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.5);
        parameter.mutable_grad() = at::Tensor();
      }
    };
    for (std::uint64_t step = 0; step < 4; ++step) {
      pipe.train_step(seeded({9, kWidth}, 10 + step), seeded({9, kWidth}, 20 + step), mean_square);
      update();
    }
    pipe.finish();
    update();
    for (std::size_t layer = 0; layer < 3; ++layer) {
      if (const auto module = pipe.module(static_cast<int>(layer)))
        weights[layer] = module->parameters()[0].detach().clone();
    }
  });
  return weights;
}

TEST(PipelineCheckpointLayers, RecomputeWithTheParametersOfTheirStep) {
  const auto expected = trained_with_overlap(ActivationCheckpoint::kNever, {});
  for (const std::vector<int>& selection : {std::vector{0}, {1}, {2}, {0, 2}, {0, 1, 2}}) {
    const auto weights = trained_with_overlap(ActivationCheckpoint::kAlways, selection);
    for (std::size_t layer = 0; layer < 3; ++layer)
      EXPECT_TRUE(weights[layer].equal(expected[layer])) << "layer " << layer;
  }
}

TEST(PipelineCheckpointLayers, RecomputeTheSelectedLayersOnly) {
  PipelineOptions options;
  options.seed = 5;
  options.checkpoint = ActivationCheckpoint::kAlways;
  options.checkpoint_layers = {4};
  // Three micro-batches in each of two steps; the first layer has two uses.
  EXPECT_EQ(train(options, 2).forwards, (std::map<std::uint64_t, int>{{1, 12}, {2, 12}, {3, 6}}));
  options.checkpoint = ActivationCheckpoint::kExceptLast;
  EXPECT_EQ(train(options, 2).forwards, (std::map<std::uint64_t, int>{{1, 12}, {2, 10}, {3, 6}}));
  options.checkpoint_layers = {0, 6};
  EXPECT_EQ(train(options, 2).forwards, (std::map<std::uint64_t, int>{{1, 20}, {2, 6}, {3, 10}}));
}

TEST(PipelineCheckpointLayers, KeepTheGraphsOfTheOthers) {
  Layers layers;
  for (std::uint64_t layer = 0; layer < 6; ++layer) layers.add<Dense>(layer + 1);
  const auto activation = [&](ActivationCheckpoint checkpoint, std::vector<int> selection) {
    double bytes = 0;
    on_workers(2, 1, [&](Worker& worker) {
      if (worker.rank() != 1) return;
      PipelineOptions options;
      options.seed = 1;
      options.checkpoint = checkpoint;
      options.checkpoint_layers = std::move(selection);
      const at::Tensor x = seeded({100, kWidth}, 3);
      const auto costs = measure_costs(worker, layers, options, {x, x, loss_of(mean_square), 1});
      bytes = costs[0].activation / (100 * kWidth * 8);
    });
    return bytes;
  };
  // Batches that the first of two ranges keeps: the outputs of its three layers; a recomputed layer's input is the
  // output of the layer before it, and its own output is the input of the next one.
  EXPECT_NEAR(activation(ActivationCheckpoint::kNever, {}), 3, 0.1);
  EXPECT_NEAR(activation(ActivationCheckpoint::kAlways, {}), 0, 0.1);
  EXPECT_NEAR(activation(ActivationCheckpoint::kAlways, {0}), 3, 0.1);
  EXPECT_NEAR(activation(ActivationCheckpoint::kAlways, {2}), 2, 0.1);
  EXPECT_NEAR(activation(ActivationCheckpoint::kAlways, {0, 1, 2}), 2, 0.1);
}

std::string error_with(const PipelineOptions& options, const Layers& layers) {
  std::string text;
  on_workers(2, 1, [&](Worker& worker) {
    const std::string mine = error_text([&] {
      Pipeline pipe(worker, layers, options);
      const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
      pipe.train_step(x, y, mean_square);
    });
    if (worker.rank() == 0) text = mine;
  });
  return text;
}

TEST(PipelineCheckpointLayers, NameALayerWhoseInputChanges) {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add_function("adder", [](at::Tensor x) { return x.add_(1); });
  layers.add_function("square", [](const at::Tensor& x) { return x * x; });
  layers.add<Dense>(2u);
  PipelineOptions options;
  options.balance = {3, 1};
  options.micro_batches = 2;
  options.checkpoint = ActivationCheckpoint::kAlways;
  options.checkpoint_layers = {1};
  EXPECT_THAT(error_with(options, layers),
              AllOf(HasSubstr("the input of this checkpointed layer was changed in place"),
                    HasSubstr("failed in the forward of micro-batch 0 through layer 'adder'"),
                    HasSubstr("leave the layer out of")));
  // A later layer changes the input of a recomputed one, whose output is a view of it.
  Layers later;
  later.add<Dense>(1u);
  later.add_function("view", [](const at::Tensor& x) { return x.view({-1, kWidth}); });
  later.add_function("adder", [](at::Tensor x) { return x.add_(1); });
  later.add<Dense>(2u);
  EXPECT_THAT(error_with(options, later),
              AllOf(HasSubstr("was changed in place"), HasSubstr("layer 'view'")));
}

TEST(PipelineCheckpointLayers, AllowInPlaceChangesOfOtherInputs) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("adder", [](at::Tensor x) { return x.add_(1); });
    layers.add<Dense>(2u);
    PipelineOptions options;
    options.balance = {2, 1};
    options.micro_batches = 2;
    options.checkpoint = ActivationCheckpoint::kAlways;
    options.checkpoint_layers = {0, 2};
    Pipeline pipe(worker, layers, options);
    const at::Tensor x = seeded({4, kWidth}, 3), y = seeded({4, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    Dense a(1u), b(2u);
    mean_square(b->forward(a->forward(x) + 1), y).backward();
    expect_gradients(pipe, {a.ptr(), nullptr, b.ptr()});
  });
}

TEST(PipelineCheckpointLayers, NameALayerThatReturnsSomethingElseTheSecondTime) {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add_function("changes", [](const at::Tensor& x) -> std::vector<at::Tensor> {
    if (torch::GradMode::is_enabled()) return {x, x};
    return {x};
  });
  layers.add_function("first", [](const std::vector<at::Tensor>& all) { return all.front(); });
  layers.add<Dense>(2u);
  PipelineOptions options;
  options.balance = {3, 1};
  options.checkpoint = ActivationCheckpoint::kAlways;
  options.checkpoint_layers = {1};
  EXPECT_THAT(error_with(options, layers),
              AllOf(HasSubstr("returned other tensors than the forward"), HasSubstr("layer 'changes'"),
                    HasSubstr("repeated forward of micro-batch 0")));
}

TEST(PipelineCheckpointLayers, RefuseLayersThatDoNotExistAndAPolicyWithoutEffect) {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add<Dense>(2u);
  PipelineOptions options;
  options.checkpoint_layers = {0, 2};
  EXPECT_THAT(error_with(options, layers),
              HasSubstr("PipelineOptions::checkpoint_layers contains 2; the model has layers 0 to 1"));
  options.checkpoint_layers = {-1};
  EXPECT_THAT(error_with(options, layers), HasSubstr("contains -1"));
  options.checkpoint_layers = {1};
  options.checkpoint = ActivationCheckpoint::kNever;
  EXPECT_THAT(error_with(options, layers), HasSubstr("checkpoint_layers has no effect"));
  on_workers(2, 1, [&](Worker& worker) {
    PipelineOptions mine;
    mine.checkpoint_layers = {worker.rank()};
    EXPECT_THAT(error_text([&] { Pipeline pipe(worker, layers, mine); }),
                HasSubstr("the workers create different pipelines"));
  });
}

TEST(PipelineOffload, IsRefusedWithAdviceWhereItHasNoEffect) {
  Layers layers;
  layers.add<Dense>(1u);
  layers.add<Dense>(2u);
  PipelineOptions options;
  options.offload = true;
  EXPECT_THAT(error_with(options, layers),
              AllOf(HasSubstr("PipelineOptions::offload copies activations from a GPU"),
                    HasSubstr("is on device cpu: remove offload")));
  options.checkpoint_layers = {1};
  EXPECT_THAT(error_with(options, layers), HasSubstr("remove checkpoint_layers or offload"));
  options.checkpoint_layers.clear();
  options.checkpoint = ActivationCheckpoint::kNever;
  EXPECT_THAT(error_with(options, layers), HasSubstr("set checkpoint, or remove offload"));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::checkpoint_layers_test
