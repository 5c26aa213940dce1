// peer: other_pipelines DS tied layers, MG embedding replicas
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::tied_parameters_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Multiplies by a transposed matrix, as the last layer of a language model does.
struct ScoresImpl : torch::nn::Module {
  explicit ScoresImpl(const at::Tensor& matrix) { weight = register_parameter("weight", matrix.clone()); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Scores);

/// A dense layer, others, and scores tied to the first; then the same in one process with one tensor.
Layers tied_layers(int between) {
  Layers layers;
  const auto first = layers.add<Dense>(1u).named("embedding");
  for (int layer = 0; layer < between; ++layer) layers.add<Dense>(10 + static_cast<std::uint64_t>(layer));
  const auto last = layers.add<Scores>(seeded({kWidth, kWidth}, 99)).named("scores");
  layers.tie({{first, "weight"}, {last, "weight"}});
  return layers;
}

struct TiedTwins {
  explicit TiedTwins(int between) {
    for (int layer = 0; layer < between; ++layer) dense.emplace_back(static_cast<std::uint64_t>(10 + layer));
  }
  at::Tensor forward(at::Tensor x) {
    x = first->forward(x);
    for (Dense& layer : dense) x = layer->forward(x);
    return at::matmul(x, first->weight.t());
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = first->parameters();
    for (const Dense& layer : dense) {
      for (const at::Tensor& parameter : layer->parameters()) all.push_back(parameter);
    }
    return all;
  }
  Dense first{1u};
  std::vector<Dense> dense;
};

PipelineOptions options_for(int stages, Schedule schedule) {
  PipelineOptions options;
  options.balance.assign(static_cast<std::size_t>(stages), 1);
  options.micro_batches = 3;
  options.schedule = schedule;
  return options;
}

/// The copies that this worker has, by layer.
std::vector<at::Tensor> copies(const Pipeline& pipe, int layers) {
  std::vector<at::Tensor> found;
  for (const int layer : {0, layers - 1}) {
    if (const auto module = pipe.module(layer)) found.push_back(module->named_parameters()["weight"]);
  }
  return found;
}

void expect_training_as_one_process(int workers, int stages, Schedule schedule, bool clips) {
  on_workers(workers, 1, [&](Worker& worker) {
    Pipeline pipe(worker, tied_layers(stages - 2), options_for(stages, schedule));
    TiedTwins twins(stages - 2);
    for (const at::Tensor& copy : copies(pipe, stages)) EXPECT_TRUE(at::equal(copy, twins.first->weight));
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD plain(twins.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (std::uint64_t step = 0; step < 4; ++step) {
      const auto rows = static_cast<std::int64_t>(7 + step);
      const at::Tensor x = seeded({rows, kWidth}, 20 + step), y = seeded({rows, kWidth}, 30 + step);
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected = mean_square(twins.forward(x), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
      for (const at::Tensor& copy : copies(pipe, stages))
        expect_close(copy.grad(), twins.first->weight.grad());
      if (step % 2 == 0) continue;  // gradients of two steps add up
      if (clips) {
        const double norm = pipe.clip_grad_norm(0.05);
        EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(twins.parameters(), 0.05), 1e-12);
      }
      optimizer.step();
      plain.step();
      optimizer.zero_grad();
      plain.zero_grad();
      for (const at::Tensor& copy : copies(pipe, stages)) expect_close(copy, twins.first->weight);
    }
  });
}

TEST(TiedParameters, TrainLikeOneTensorInOneProcess) {
  for (const Schedule schedule : {Schedule::kArrival, Schedule::kGPipe, Schedule::k1F1B, Schedule::kZBH1}) {
    for (const int workers : {2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} workers, schedule {}", workers, static_cast<int>(schedule)));
      expect_training_as_one_process(workers, workers, schedule, false);
    }
  }
}

TEST(TiedParameters, OnOneWorkerTrainLikeOneTensor) {
  expect_training_as_one_process(1, 3, Schedule::k1F1B, true);
  expect_training_as_one_process(2, 4, Schedule::kZBV, true);  // first and last stage on worker 0
}

TEST(TiedParameters, CountOnceInTheNormOfAllStages) {
  for (const int workers : {2, 3}) expect_training_as_one_process(workers, workers, Schedule::k1F1B, true);
}

TEST(TiedParameters, HaveTheSameBitsOnAllWorkers) {
  std::vector<at::Tensor> seen(3);
  on_workers(3, 1, [&](Worker& worker) {
    Layers layers;
    std::vector<TiedParameter> all;
    for (std::uint64_t layer = 0; layer < 3; ++layer) all.emplace_back(layers.add<Dense>(layer), "weight");
    layers.tie(all);
    Pipeline pipe(worker, layers, options_for(3, Schedule::kZBH1));
    torch::optim::SGD optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1));
    for (std::uint64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      pipe.train_step(seeded({9, kWidth}, step), seeded({9, kWidth}, 7), mean_square);
      pipe.clip_grad_norm(0.1);
      optimizer.step();
    }
    seen[worker.rank()] = pipe.parameters()[0].detach();
  });
  EXPECT_TRUE(at::equal(seen[0], seen[1]));
  EXPECT_TRUE(at::equal(seen[0], seen[2]));
}

TEST(TiedParameters, WorkWithForwardAndBackwardApart) {
  on_workers(2, 1, [](Worker& worker) {
    Pipeline pipe(worker, tied_layers(0), options_for(2, Schedule::k1F1B));
    TiedTwins twins(0);
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    const Batch output = pipe.forward(x);
    if (worker.rank() == 1) mean_square(output.tensor(), y).backward();
    pipe.backward();
    mean_square(twins.forward(x), y).backward();
    for (const at::Tensor& copy : copies(pipe, 2)) expect_close(copy.grad(), twins.first->weight.grad());
  });
}

TEST(TiedParameters, AllowModulesThatShareATensor) {
  on_workers(2, 1, [](Worker& worker) {
    Dense first(1u), last(2u);
    last->weight = last->register_parameter("shared", first->weight);
    Layers layers;
    const auto a = layers.add_existing(first);
    const auto b = layers.add_existing(last);
    layers.tie({{a, "weight"}, {b, "shared"}});
    Pipeline pipe(worker, layers, options_for(2, Schedule::k1F1B));
    Dense plain_first(1u), plain_last(2u);
    plain_last->weight = plain_first->weight;
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    mean_square(plain_last->forward(plain_first->forward(x)), y).backward();
    const at::Tensor mine = worker.rank() == 0 ? first->weight : last->weight;
    expect_close(mine.grad(), plain_first->weight.grad());
  });
}

/// The error that each of two workers gets from a pipeline whose layers `add` adds.
std::vector<std::string> errors_of(const std::function<void(Layers&, Worker&)>& add) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    Layers layers;
    add(layers, worker);
    texts[worker.rank()] =
        error_text([&] { Pipeline pipe(worker, layers, options_for(2, Schedule::k1F1B)); });
  });
  EXPECT_EQ(texts[0], texts[1]);
  return texts;
}

TEST(TiedParameters, ThatDoNotFitAreRefusedOnAllWorkers) {
  using Parameters = std::vector<TiedParameter>;
  const auto with = [](const std::function<void(Layers&, Use<DenseImpl>, Use<ScoresImpl>)>& tie,
                       const at::Tensor& matrix) {
    return errors_of([&](Layers& layers, Worker&) {
      const auto first = layers.add<Dense>(1u).named("embedding");
      const auto last = layers.add<Scores>(matrix).named("scores");
      tie(layers, first, last);
    })[0];
  };
  const at::Tensor square = seeded({kWidth, kWidth}, 9);
  const auto usual = [](Layers& layers, auto first, auto last) {
    layers.tie({{first, "weight"}, {last, "weight"}});
  };
  EXPECT_THAT(with(
                  [](Layers& layers, auto first, auto last) {
                    layers.tie({{first, "weight"}, {last, "matrix"}});
                  },
                  square),
              HasSubstr("'matrix' of layer 1 ('scores') does not exist; the layer has weight"));
  EXPECT_THAT(with(usual, seeded({kWidth, kWidth + 1}, 9)),
              AllOf(HasSubstr("'weight' of layer 0 ('embedding') is Double [3, 3], requires gradients"),
                    HasSubstr("'weight' of layer 1 ('scores') is Double [3, 4]")));
  EXPECT_THAT(with(usual, square.to(at::kFloat)), HasSubstr("is Float [3, 3]"));
  EXPECT_THAT(with(
                  [](Layers& layers, auto first, auto) {
                    layers.tie(Parameters{{first, "weight"}});
                  },
                  square),
              HasSubstr("a tie needs two parameters or more"));
  EXPECT_THAT(with(
                  [&](Layers& layers, auto first, auto last) {
                    usual(layers, first, last);
                    usual(layers, first, last);
                  },
                  square),
              HasSubstr("is tied twice"));
}

TEST(TiedParameters, ThatOneWorkerDeclaresOtherwiseAreRefused) {
  const auto texts = errors_of([](Layers& layers, Worker& worker) {
    const auto first = layers.add<Dense>(1u), second = layers.add<Dense>(2u);
    if (worker.rank() == 0) layers.tie({{first, "weight"}, {second, "weight"}});
  });
  EXPECT_THAT(texts[0], HasSubstr("\"tie 0.weight 1.weight\""));
}

/// Throws in its backward as long as it is armed.
struct Fuse : torch::autograd::Function<Fuse> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t armed) {
    context->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (*reinterpret_cast<bool*>(context->saved_data["armed"].toInt())) throw std::runtime_error("it blew");
    return {gradients[0], at::Tensor()};
  }
};

TEST(TiedParameters, KeepEarlierGradientsIfAStepFails) {
  on_workers(2, 1, [](Worker& worker) {
    bool armed = false;
    Layers layers;
    const auto first = layers.add<Dense>(1u), last = layers.add<Dense>(2u);
    layers.add_function("fuse", [&armed](const at::Tensor& x) {
      return Fuse::apply(x, reinterpret_cast<std::int64_t>(&armed));
    });
    layers.tie({{first, "weight"}, {last, "weight"}});
    PipelineOptions options = options_for(2, Schedule::kZBH1);
    options.balance = {1, 2};
    Pipeline pipe(worker, layers, options);
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    const at::Tensor before = pipe.parameters()[0].grad().clone();
    armed = true;
    EXPECT_THAT(error_text([&] { pipe.train_step(x, y, mean_square); }), HasSubstr("it blew"));
    expect_close(pipe.parameters()[0].grad(), before);
    armed = false;
    pipe.train_step(x, y, mean_square);
    expect_close(pipe.parameters()[0].grad(), 2 * before);
  });
}

TEST(TiedParameters, NormsOfEveryTypeAreThoseOfOneProcess) {
  on_workers(3, 1, [](Worker& worker) {
    Pipeline pipe(worker, tied_layers(1), options_for(3, Schedule::k1F1B));
    TiedTwins twins(1);
    const at::Tensor x = seeded({6, kWidth}, 3), y = seeded({6, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    mean_square(twins.forward(x), y).backward();
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const double expected = torch::nn::utils::clip_grad_norm_(twins.parameters(), 1e9, type);
      EXPECT_NEAR(pipe.clip_grad_norm(1e9, type), expected, 1e-12 * std::max(1.0, expected))
          << "type " << type;
    }
    EXPECT_THAT(error_text([&] { pipe.clip_grad_norm(0); }), HasSubstr("max_norm is 0"));
    EXPECT_THAT(error_text([&] { pipe.clip_grad_norm(1, -1); }), HasSubstr("norm_type is -1"));
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::tied_parameters_test
