#include <gmock/gmock.h>
#include <map>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"
#include "state/api/gradient_norm.h"
#include "state/api/place.h"

namespace torchspan::pipeline::testing::sharing_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Layers that are used more than once, and which worker builds them.

// peer suite: pipe verify_module_duplicate_parameters_on_distinct_devices: better: a layer has one owner
//   and any number of uses
// peer suite: async_pipe reuse_lazy, rpc_optimizer: better: every small model of reused layers with every
//   split
// peer: async_pipe rpc_reuse_in_final_stage: better: values are compared
// peer: other_pipelines DS tied layers, MG embedding replicas: better: one owner, so no replicas have to be
//   kept equal
TEST(PipelineSharing, FirstAndLastStageShareWeightsThroughASecondMethod) {
  in_every_way([](PipelineOptions options) {
    on_workers(3, 1, [&](Worker& worker) {
      Layers layers;
      const auto embedding = layers.add<Dense>(1u);
      layers.add<Dense>(2u);
      layers.add<Dense>(3u);
      layers.reuse(embedding, "back", &DenseImpl::back);
      Pipeline pipe(worker, layers, options);
      EXPECT_EQ(pipe.parameters().size(), 2u) << "one owner, one set of parameters";
      const at::Tensor x = seeded({7, kWidth}, 4), y = seeded({7, kWidth}, 5);
      const double loss = pipe.train_step(x, y, mean_square);

      Dense a(1u), b(2u), c(3u);
      const at::Tensor expected = mean_square(a->back(c->forward(b->forward(a->forward(x)))), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12) << "also on workers that do not end the model";
      expect_gradients(pipe, {a.ptr(), b.ptr(), c.ptr()});
      const Batch output = pipe.infer(x);
      EXPECT_EQ(output.size(), worker.rank() == 0 ? 1u : 0u) << "the last use is on the first worker";
    });
  });
}

/// One step of the pipeline, and the norm of all gradients by each way to ask for it.
void expect_norms(Pipeline& pipe, const std::string& when) {
  for (const at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad().reset();
  const at::Tensor x = seeded({7, kWidth}, 4), y = seeded({7, kWidth}, 5);
  pipe.train_step(x, y, mean_square);
  Dense a(1u), b(2u);
  mean_square(b->forward(a->forward(x)), y).backward();
  std::vector<at::Tensor> all = a->parameters();
  for (const at::Tensor& parameter : b->parameters()) all.push_back(parameter);
  const double expected = torch::nn::utils::clip_grad_norm_(all, 1e9);
  EXPECT_NEAR(pipe.clip_grad_norm(1e9), expected, 1e-12) << when;
  const auto as_an_optimizer = state::gradients_at_places(pipe.parameters());
  EXPECT_NEAR(state::norm_over_places(as_an_optimizer, 2), expected, 1e-12) << when;
}

TEST(PipelineSharing, PipelinesOverTheSameModulesMeasureEachGradientOnce) {
  on_workers(2, 1, [](Worker& worker) {
    Dense a(1u), b(2u);
    const auto make = [&](std::string name, int micro_batches) {
      Layers layers;
      layers.add_existing(a);
      layers.add_existing(b);
      return std::make_unique<Pipeline>(
          worker, layers, PipelineOptions{.micro_batches = micro_batches, .name = std::move(name)});
    };
    auto first = make("first", 3);
    expect_norms(*first, "alone");
    auto second = make("second", 2);
    expect_norms(*first, "the older of two");
    expect_norms(*second, "the newer of two");
    first.reset();
    expect_norms(*second, "after the older one's end");
    auto third = make("third", 1), fourth = make("fourth", 1);
    third.reset();
    fourth.reset();
    expect_norms(*second, "after the newer ones' end");
    second.reset();
    const auto& parameters = worker.rank() == 0 ? a->parameters() : b->parameters();
    for (const at::Tensor& parameter : parameters) EXPECT_FALSE(state::place_of(parameter));
  });
}

TEST(PipelineSharing, AWorkerWithoutParametersTakesPartInClipping) {
  on_workers(3, 1, [](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add_function("tanh", [](const at::Tensor& x) { return x.tanh(); });
    layers.add<Dense>(2u);
    Pipeline pipe(worker, layers, {.balance = {1, 1, 1}, .micro_batches = 2});
    EXPECT_EQ(pipe.parameters().empty(), worker.rank() == 1);
    const at::Tensor x = seeded({7, kWidth}, 4), y = seeded({7, kWidth}, 5);
    pipe.train_step(x, y, mean_square);
    Dense a(1u), b(2u);
    mean_square(b->forward(a->forward(x).tanh()), y).backward();
    std::vector<at::Tensor> all = a->parameters();
    for (const at::Tensor& parameter : b->parameters()) all.push_back(parameter);
    EXPECT_NEAR(pipe.clip_grad_norm(1), torch::nn::utils::clip_grad_norm_(all, 1), 1e-12);
  });
}

TEST(PipelineSharing, TheTargetIsUsedWhereTheLastUseIs) {
  on_workers(2, 1, [](Worker& worker) {
    Layers layers;
    const auto first = layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    layers.reuse(first);
    Pipeline pipe(worker, layers, {.micro_batches = 3});
    const at::Tensor x = seeded({7, kWidth}, 4), y = seeded({7, kWidth}, 5);
    // Worker 1 builds neither.
    const bool here = worker.rank() == 0;
    const double loss =
        pipe.train_step(here ? Batch(x) : Batch(), here ? Batch(y) : Batch(), loss_of(mean_square));
    Dense a(1u), b(2u);
    const at::Tensor expected = mean_square(a->forward(b->forward(a->forward(x))), y);
    EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
  });
}

/// Every model of up to four uses of up to three layers, in every cut.
TEST(PipelineSharing, EverySmallModelOfReusedLayersEqualsThePlainOne) {
  for (const std::string letters :
       {"AAB", "ABA", "ABAB", "ABAC", "AABB", "ABBA", "ABCA", "ABCB", "AAAA", "ABAA"}) {
    const int distinct = 1 + *std::max_element(letters.begin(), letters.end()) - 'A';
    for (int stages = 1; stages <= distinct; ++stages) {
      SCOPED_TRACE(letters + " in " + std::to_string(stages));
      on_workers(stages, 1, [&](Worker& worker) {
        Layers layers;
        std::map<char, Use<DenseImpl>> uses;
        std::map<char, Dense> twins;
        for (const char letter : letters) {
          const auto seed = static_cast<std::uint64_t>(letter - 'A');
          if (uses.contains(letter)) {
            layers.reuse(uses.at(letter));
          } else {
            uses.emplace(letter, layers.add<Dense>(seed));
            twins.emplace(letter, Dense(seed));
          }
        }
        PipelineOptions options;
        options.balance.assign(static_cast<std::size_t>(stages), 1);
        options.balance.back() += distinct - stages;
        options.micro_batches = 3;
        Pipeline pipe(worker, layers, options);
        const at::Tensor x = seeded({5, kWidth}, 4), y = seeded({5, kWidth}, 5);
        const double loss = pipe.train_step(x, y, mean_square);
        at::Tensor plain = x;
        for (const char letter : letters) plain = twins.at(letter)->forward(plain);
        const at::Tensor expected = mean_square(plain, y);
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
        std::vector<std::shared_ptr<torch::nn::Module>> all;
        for (auto& [letter, twin] : twins) all.push_back(twin.ptr());
        expect_gradients(pipe, all);
      });
    }
  }
}

// peer: pipelining grad_with_manual_interleaved, non_symmetric_stage_ids: same
TEST(PipelineSharing, OneWorkerMayOwnSeveralStages) {
  for (const Schedule schedule :
       {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B, Schedule::kInterleaved}) {
    for (const int micro_batches : {1, 3, 4}) {
      on_workers(2, 1, [&](Worker& worker) {
        Layers layers;
        std::vector<std::shared_ptr<torch::nn::Module>> twins;
        at::Tensor plain = seeded({8, kWidth}, 50);
        const at::Tensor x = plain, y = seeded({8, kWidth}, 51);
        for (std::uint64_t seed = 1; seed <= 6; ++seed) {
          layers.add<Dense>(seed);
          Dense twin(seed);
          plain = twin->forward(plain);
          twins.push_back(twin.ptr());
        }
        Pipeline pipe(
            worker, layers,
            {.balance = {2, 1, 2, 1}, .workers = {}, .micro_batches = micro_batches, .schedule = schedule});
        EXPECT_EQ(pipe.parameters().size(), worker.rank() == 0 ? 8u : 4u);
        const double loss = pipe.train_step(x, y, mean_square);
        const at::Tensor expected = mean_square(plain, y);
        expected.backward();
        EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
        expect_gradients(pipe, twins);
      });
    }
  }
}

struct CountedImpl : torch::nn::Module {
  CountedImpl(std::map<int, int>* built_by, int* rank) { ++(*built_by)[*rank]; }
  at::Tensor forward(const at::Tensor& x) { return x + 1; }
};
TORCH_MODULE(Counted);

// peer: pipe parameters
// peer: async_pipe lazy_construction: same
TEST(PipelineConstruction, OnlyTheOwnerBuildsALayerAndOnce) {
  std::vector<std::map<int, int>> built(3);
  on_workers(3, 1, [&](Worker& worker) {
    int rank = worker.rank();
    Layers layers;
    std::vector<Use<CountedImpl>> uses;
    for (auto& layer : built) uses.push_back(layers.add<Counted>(&layer, &rank));
    layers.reuse(uses[0]);
    layers.reuse(uses[2]);
    EXPECT_EQ(built[static_cast<std::size_t>(rank)][rank], 0);
    Pipeline pipe(worker, layers, {.micro_batches = 2});
    for (int layer = 0; layer < 3; ++layer) EXPECT_EQ(pipe.module(layer) != nullptr, layer == rank);
    pipe.infer(at::ones({2, 1}));
  });
  for (int layer = 0; layer < 3; ++layer) {
    std::map<int, int> expected{{layer, 1}};
    EXPECT_EQ(built[static_cast<std::size_t>(layer)], expected) << "layer " << layer;
  }
}

// peer: pipe parameters, public_attrs, sequential_like, devices, partitions, named_children: differs: a
//   pipeline is not a module; `parameters()` and `module(layer)` return those of this worker's layers
TEST(PipelineConstruction, ParametersComeOnceInTheOrderOfTheLayers) {
  on_workers(1, 1, [](Worker& worker) {
    Dense shared(1u);
    Layers layers;
    layers.add_existing(shared);
    layers.add<Dense>(2u);
    layers.add_existing(shared);
    Pipeline pipe(worker, layers, {.balance = {3}, .workers = {"worker0"}});
    const auto parameters = pipe.parameters();
    ASSERT_EQ(parameters.size(), 4u) << "a module that is two layers has its parameters once";
    EXPECT_TRUE(parameters[0].is_same(shared->weight));
    EXPECT_TRUE(parameters[1].is_same(shared->bias));
  });
}

// Initial weights.

using Weights = std::map<int, at::Tensor>;

/// The first parameter of every layer of a model of four equal layers that is split over some workers.
Weights initial_weights(int workers, std::optional<std::uint64_t> seed) {
  Weights weights;
  on_workers(workers, 1, [&](Worker& worker) {
    Layers layers;
    for (int layer = 0; layer < 4; ++layer) layers.add<torch::nn::Linear>(kWidth, kWidth);
    torch::manual_seed(3);
    PipelineOptions options;
    options.seed = seed;
    Pipeline pipe(worker, layers, options);
    for (int layer = 0; layer < 4; ++layer) {
      if (const auto module = pipe.module(layer)) weights[layer] = module->parameters()[0].detach();
    }
  });
  return weights;
}

TEST(PipelineWeights, FollowFromTheSeedAndTheLayerHoweverTheModelIsSplit) {
  for (const int workers : {1, 2, 4}) {
    Weights weights = initial_weights(workers, 5);
    ASSERT_EQ(weights.size(), 4u);
    for (int layer = 0; layer < 4; ++layer) {
      torch::manual_seed(seed_of_layer(5, layer));
      EXPECT_TRUE(weights[layer].equal(torch::nn::Linear(kWidth, kWidth)->weight)) << "layer " << layer;
    }
  }
}

TEST(PipelineWeights, WithoutASeedFollowFromTheFirstWorkersGenerator) {
  Weights alone = initial_weights(1, std::nullopt), split = initial_weights(4, std::nullopt);
  ASSERT_EQ(split.size(), 4u);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_TRUE(alone[layer].equal(split[layer])) << "layer " << layer;
    for (int other = 0; other < layer; ++other) EXPECT_FALSE(split[layer].equal(split[other]));
  }
}

// Tensors that two layers share.

/// A projection by a given matrix.
struct ProjectionImpl : torch::nn::Module {
  explicit ProjectionImpl(const at::Tensor& matrix) {
    weight = register_parameter("weight", matrix, matrix.requires_grad());
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Projection);

/// Counts its forwards in a given buffer.
struct CounterImpl : torch::nn::Module {
  CounterImpl(const at::Tensor& counter, bool counts) : counting(counts) {
    count = register_buffer("count", counter);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (counting) count += 1;
    return x + 1;
  }
  at::Tensor count;
  bool counting;
};
TORCH_MODULE(Counter);

/// The errors of all workers that create and train a pipeline of three layers, of which the first and the
/// last share a tensor.
std::vector<std::string> tied(const std::function<void(Layers&)>& add_layers,
                              std::vector<std::string> owners = {}) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    add_layers(layers);
    try {
      Pipeline pipe(worker, layers, {.balance = {1, 2}, .workers = owners, .micro_batches = 2});
      pipe.train_step(seeded({4, kWidth}, 1), seeded({4, kWidth}, 2), mean_square);
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(worker.rank())] = error.what();
    }
  });
  return texts;
}

TEST(PipelineTies, OfParametersOnTwoWorkersAreRefusedByName) {
  const auto existing = [](Layers& layers) {
    Dense first(1u), last(2u);
    last->weight = last->register_parameter("tied", first->weight);
    layers.add_existing(first).named("embedding");
    layers.add<Dense>(3u);
    layers.add_existing(last).named("scores");
  };
  const auto transposed = [](Layers& layers) {
    Dense first(1u);
    layers.add_existing(first).named("embedding");
    layers.add<Dense>(3u);
    layers.add_existing(Projection(first->weight.detach().t().set_requires_grad(true))).named("scores");
  };
  const auto argument = [](Layers& layers) {
    const at::Tensor matrix = seeded({kWidth, kWidth}, 1).set_requires_grad(true);
    layers.add<Projection>(matrix).named("embedding");
    layers.add<Dense>(3u);
    layers.add<Projection>(matrix).named("scores");
  };
  for (const std::function<void(Layers&)>& add :
       {std::function(existing), std::function(transposed), std::function(argument)}) {
    for (const std::string& text : tied(add)) {
      EXPECT_THAT(text, HasSubstr("'weight' of layer 'embedding' (order 0, stage 0 on 'worker0') and '"));
      EXPECT_THAT(text, HasSubstr("of layer 'scores' (order 2, stage 1 on 'worker1')"));
      EXPECT_THAT(text, HasSubstr("Layers::reuse"));
    }
    // With one owner there is one tensor.
    EXPECT_THAT(tied(add, {"worker0", "worker0"}).front(), ::testing::IsEmpty());
  }
}

TEST(PipelineTies, DoNotIncludeFrozenTensors) {
  const auto frozen = [](Layers& layers) {
    const at::Tensor matrix = seeded({kWidth, kWidth}, 1), counter = at::zeros({1});
    layers.add<Projection>(matrix);
    layers.add<Dense>(3u);
    layers.add_existing(Projection(matrix));
  };
  EXPECT_THAT(tied(frozen), ElementsAre("", ""));
  // Different parts of one storage are different tensors.
  const auto flat = [](Layers& layers) {
    const at::Tensor both = seeded({2, kWidth, kWidth}, 1);
    layers.add<Projection>(both[0].set_requires_grad(true));
    layers.add<Dense>(3u);
    layers.add<Projection>(both[1].set_requires_grad(true));
  };
  EXPECT_THAT(tied(flat), ElementsAre("", ""));
}

TEST(PipelineTies, OfABufferThatAStepChangesEndTheStep) {
  const auto with = [](bool counts) {
    return tied([counts](Layers& layers) {
      const at::Tensor counter = at::zeros({1});
      layers.add<Counter>(counter, false).named("first");
      layers.add<Dense>(3u);
      layers.add<Counter>(counter, counts).named("last");
    });
  };
  EXPECT_THAT(with(false), ElementsAre("", ""));
  for (const std::string& text : with(true)) {
    EXPECT_THAT(text, HasSubstr("share a tensor, which a step changed on worker 'worker1' only: 'count' of "
                                "layer 'first' (order 0, stage 0 on 'worker0') and 'count' of layer 'last'"));
  }
}

/// The errors of all workers that create the pipeline.
std::vector<std::string> refused(int workers,
                                 const std::function<void(Worker&, Layers&, PipelineOptions&)>& set) {
  std::vector<std::string> texts(static_cast<std::size_t>(workers));
  on_workers(workers, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u).named("first");
    layers.add<Dense>(2u).named("second");
    PipelineOptions options;
    set(worker, layers, options);
    texts[static_cast<std::size_t>(worker.rank())] = error_text([&] { Pipeline(worker, layers, options); });
  });
  return texts;
}

void expect_all(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr(part));
}

// peer: pipe chunks_less_than_1, checkpoint_mode_invalid: same; an invalid mode does not compile
TEST(PipelineConstruction, NamesTheInvalidOption) {
  expect_all(refused(2, [](Worker&, Layers&, PipelineOptions& o) { o.micro_batches = 0; }),
             "micro_batches is 0; it must be 1 or more");
  expect_all(refused(2, [](Worker&, Layers&, PipelineOptions& o) { o.max_in_flight = -1; }),
             "max_in_flight is -1");
  expect_all(refused(2, [](Worker&, Layers&, PipelineOptions& o) { o.stall_timeout = Duration::zero(); }),
             "stall_timeout must be more than zero");
  expect_all(refused(2,
                     [](Worker&, Layers&, PipelineOptions& o) {
                       o.balance = {1, 2};
                     }),
             "balance [1, 2] has 3 layers, the model has 2");
  expect_all(refused(2, [](Worker&, Layers&, PipelineOptions& o) { o.balance = {2, 0}; }), "balance[1] is 0");
}

// peer: pipe empty_module: differs: rejected
TEST(PipelineConstruction, AsksForLayersIfThereAreNone) {
  expect_all(refused(2, [](Worker&, Layers& layers, PipelineOptions&) { layers = Layers(); }),
             "there is no layer: add layers to Layers");
}

TEST(PipelineConstruction, RefusesAWorkerThatOwnsNoStage) {
  std::string text;
  on_workers(3, 1, [&](Worker& worker) {
    Layers layers;
    layers.add<Dense>(1u);
    layers.add<Dense>(2u);
    if (worker.rank() == 2) {
      text = error_text([&] { Pipeline(worker, layers, {}); });
    } else {
      Pipeline(worker, layers, {});
    }
  });
  EXPECT_THAT(text,
              HasSubstr("worker 'worker2' owns no stage of pipeline 'pipeline' and must not create it"));
}

TEST(PipelineConstruction, NamesTheDifferencesBetweenWorkers) {
  const auto differ = [](const std::function<void(Layers&, PipelineOptions&)>& set) {
    return refused(2, [&](Worker& worker, Layers& layers, PipelineOptions& options) {
      if (worker.rank() == 1) set(layers, options);
    });
  };
  expect_all(differ([](Layers&, PipelineOptions& o) { o.micro_batches = 7; }),
             "worker 'worker0' has \"micro_batches 1\", worker 'worker1' has \"micro_batches 7\"");
  expect_all(differ([](Layers&, PipelineOptions& o) { o.schedule = Schedule::kGPipe; }), "schedule");
  expect_all(differ([](Layers&, PipelineOptions& o) { o.seed = 3; }), "seed none");
  expect_all(differ([](Layers&, PipelineOptions& o) { o.name = "other\tname"; }),
             "worker 'worker0' has \"name pipeline\", worker 'worker1' has \"name other name\"");
  expect_all(differ([](Layers& layers, PipelineOptions&) { layers.add<Dense>(9u).named("third"); }), "third");
}

TEST(PipelineConstruction, NamesTheLayerThatCouldNotBeBuiltOnAllWorkers) {
  struct Broken {
    Broken() { throw std::runtime_error("no memory for it"); }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  expect_all(refused(2,
                     [](Worker&, Layers& layers, PipelineOptions& options) {
                       layers.add<Broken>().named("broken");
                       options.balance = {1, 2};
                     }),
             "layer 'broken' (stage 1) could not be built on worker 'worker1': no memory for it");
}

TEST(PipelineConstruction, ManyPipelinesOfOneWorldAreDistinguished) {
  on_workers(2, 1, [](Worker& worker) {
    Layers plus, times;
    for (int i = 0; i < 2; ++i) {
      plus.add_function("plus", [](const at::Tensor& x) { return x + 1; });
      times.add_function("times", [](const at::Tensor& x) { return x * 2; });
    }
    Pipeline first(worker, plus, {.name = "plus"}), second(worker, times, {.name = "times"});
    Pipeline third(worker, plus, {.name = "plus"});
    for (int round = 0; round < 3; ++round) {
      const Batch a = first.infer(at::ones({2, 1})), b = second.infer(at::ones({2, 1}));
      const Batch c = third.infer(at::zeros({2, 1}));
      if (worker.rank() != 1) continue;
      EXPECT_TRUE(a.tensor().equal(at::full({2, 1}, 3.0)));
      EXPECT_TRUE(b.tensor().equal(at::full({2, 1}, 4.0)));
      EXPECT_TRUE(c.tensor().equal(at::full({2, 1}, 2.0)));
    }
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::sharing_test
