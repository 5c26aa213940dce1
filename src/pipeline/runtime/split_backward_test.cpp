// peer: pipelining `v_shape_schedules`, `grad_with_v_schedule`, `grad_with_split_b_w`,
//   `pipeline_schedule_runtime_custom_sched`
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include <torchspan/schedule.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::split_backward_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A model of `stages` dense layers with dropout-free operations between them, and the same in one process.
Layers dense_chain(int stages) {
  Layers layers;
  for (int stage = 0; stage < stages; ++stage) layers.add<Dense>(static_cast<std::uint64_t>(stage) + 1);
  return layers;
}

struct Twins {
  explicit Twins(int stages) {
    for (int stage = 0; stage < stages; ++stage) all.emplace_back(static_cast<std::uint64_t>(stage + 1));
  }
  at::Tensor forward(at::Tensor x) {
    for (Dense& dense : all) x = dense->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const {
    std::vector<std::shared_ptr<torch::nn::Module>> pointers;
    for (const Dense& dense : all) pointers.push_back(dense.ptr());
    return pointers;
  }
  std::vector<Dense> all;
};

struct Case {
  Schedule schedule;
  int chunks;
};
constexpr Case kCases[] = {{Schedule::kZBH1, 1},
                           {Schedule::kZBH2, 1},
                           {Schedule::kZB1P, 2},
                           {Schedule::kZBV, 2},
                           {Schedule::kDualPipeV, 2}};

/// Trains two steps, the second with fewer rows, and compares loss and gradients with one process.
void expect_as_one_process(int workers, const Case& tried, const PipelineOptions& options) {
  on_workers(workers, 1, [&](Worker& worker) {
    const int stages = workers * tried.chunks;
    PipelineOptions made = options;
    made.schedule = tried.schedule;
    made.balance.assign(static_cast<std::size_t>(stages), 1);
    Pipeline pipe(worker, dense_chain(stages), made);
    Twins twins(stages);
    for (const std::int64_t rows : {std::int64_t{13}, std::int64_t{3}}) {
      const at::Tensor x = seeded({rows, kWidth}, 3), y = seeded({rows, kWidth}, 4);
      const double loss = pipe.train_step(x, y, mean_square);
      const at::Tensor expected = mean_square(twins.forward(x), y);
      expected.backward();
      EXPECT_NEAR(loss, expected.item<double>(), 1e-12);
    }
    expect_gradients(pipe, twins.modules());
  });
}

TEST(SplitBackward, OfEveryScheduleTrainsLikeOneProcess) {
  for (const Case& tried : kCases) {
    for (const int workers : {1, 2, 3, 4}) {
      for (const ActivationCheckpoint checkpoint :
           {ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways}) {
        SCOPED_TRACE(fmt::format("schedule {}, {} workers, checkpoint {}", static_cast<int>(tried.schedule),
                                 workers, static_cast<int>(checkpoint)));
        expect_as_one_process(workers, tried, {.micro_batches = 2 * workers, .checkpoint = checkpoint});
        expect_as_one_process(workers, tried, {.micro_batches = 3, .checkpoint = checkpoint});
      }
    }
  }
}

TEST(SplitBackward, GivesTheBitsOfAWholeOne) {
  on_workers(3, 1, [](Worker& worker) {
    const at::Tensor x = seeded({12, kWidth}, 3), y = seeded({12, kWidth}, 4);
    // Each worker runs the backwards in the same order, so that `.grad` gets the same terms in the same order.
    std::vector<std::vector<at::Tensor>> gradients;
    for (const Schedule schedule : {Schedule::k1F1B, Schedule::kZBH1, Schedule::kZBH2}) {
      Pipeline pipe(worker, dense_chain(3), {.balance = {1, 1, 1}, .micro_batches = 6, .schedule = schedule});
      pipe.train_step(x, y, mean_square);
      gradients.emplace_back();
      for (const at::Tensor& parameter : pipe.parameters()) gradients.back().push_back(parameter.grad());
    }
    for (std::size_t parameter = 0; parameter < gradients[0].size(); ++parameter) {
      EXPECT_TRUE(at::equal(gradients[0][parameter], gradients[1][parameter]));
      EXPECT_TRUE(at::equal(gradients[0][parameter], gradients[2][parameter]));
    }
  });
}

TEST(SplitBackward, RunsATableFromACsvFile) {
  on_workers(2, 1, [](Worker& worker) {
    const std::string file = schedule::to_csv(schedule::to_sheet(schedule::zero_bubble_v({2, 4, 2})));
    PipelineOptions options{.balance = {1, 1, 1, 1},
                            .workers = {"worker0", "worker1", "worker1", "worker0"},
                            .micro_batches = 4,
                            .schedule = Schedule::kCustom,
                            .custom_schedule = [&](const schedule::Placement&) {
                              return schedule::to_table(schedule::parse_csv(file), "from a file");
                            }};
    Pipeline pipe(worker, dense_chain(4), options);
    Twins twins(4);
    const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
    pipe.train_step(x, y, mean_square);
    mean_square(twins.forward(x), y).backward();
    expect_gradients(pipe, twins.modules());
    EXPECT_EQ(pipe.last_step().table.name, "from a file");
  });
}

TEST(SplitBackward, RunsWithForwardAndBackwardApart) {
  on_workers(2, 1, [](Worker& worker) {
    Pipeline pipe(worker, dense_chain(4), {.micro_batches = 4, .schedule = Schedule::kZBV});
    Twins twins(4);
    const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
    Batch output = pipe.forward(x);
    if (worker.rank() == 0) mean_square(output.tensor(), y).backward();
    pipe.backward();
    mean_square(twins.forward(x), y).backward();
    expect_gradients(pipe, twins.modules());
    pipe.eval();
    output = pipe.infer(x);
    if (worker.rank() == 0) expect_close(output.tensor(), twins.forward(x).detach());
  });
}

TEST(SplitBackward, GivesTheInputOfThePipelineItsGradient) {
  on_workers(2, 1, [](Worker& worker) {
    Pipeline pipe(worker, dense_chain(4), {.micro_batches = 4, .schedule = Schedule::kZBV});
    Twins twins(4);
    const at::Tensor x = seeded({8, kWidth}, 3).requires_grad_(), y = seeded({8, kWidth}, 4);
    const at::Tensor same = x.detach().clone().requires_grad_();
    pipe.train_step(x, y, mean_square);
    mean_square(twins.forward(same), y).backward();
    expect_gradients(pipe, twins.modules());
    if (worker.rank() == 0) expect_close(x.grad(), same.grad());
  });
}

TEST(SplitBackward, LeavesFrozenLayersAndLayersWithoutWeightsAlone) {
  for (const int frozen : {0, 1, 2}) {
    on_workers(3, 1, [frozen](Worker& worker) {
      Layers layers;
      for (std::uint64_t stage = 0; stage < 3; ++stage) {
        Dense dense(stage + 1);
        if (static_cast<int>(stage) == frozen) {
          for (at::Tensor& parameter : dense->parameters()) parameter.requires_grad_(false);
        }
        layers.add_existing(dense);
        layers.add_function("sine", [](const at::Tensor& x) { return at::sin(x); });
      }
      Pipeline pipe(worker, layers, {.balance = {2, 2, 2}, .micro_batches = 4, .schedule = Schedule::kZBH1});
      std::vector<Dense> twins{Dense(1u), Dense(2u), Dense(3u)};
      const at::Tensor x = seeded({8, kWidth}, 3), y = seeded({8, kWidth}, 4);
      pipe.train_step(x, y, mean_square);
      at::Tensor value = x;
      for (Dense& dense : twins) value = at::sin(dense->forward(value));
      mean_square(value, y).backward();
      for (int stage = 0; stage < 3; ++stage) {
        const auto module = pipe.module(2 * stage);
        if (!module) continue;
        const at::Tensor expected = twins[static_cast<std::size_t>(stage)]->weight.grad();
        expect_close(module->named_parameters()["weight"].grad(), stage == frozen ? at::Tensor() : expected);
      }
    });
  }
}

TEST(SplitBackward, OfCustomSchedulesThatDifferIsRefusedOnAllWorkers) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    PipelineOptions options{.balance = {1, 1}, .micro_batches = 4, .schedule = Schedule::kCustom};
    options.custom_schedule = [&](const schedule::Placement& placement) {
      return worker.rank() == 0 ? schedule::gpipe(placement) : schedule::one_forward_one_backward(placement);
    };
    texts[worker.rank()] = error_text([&] { Pipeline pipe(worker, dense_chain(2), options); });
  });
  EXPECT_THAT(texts[0], HasSubstr("different tables on workers 'worker0' and 'worker1'"));
  EXPECT_EQ(texts[1], texts[0]);
}

TEST(SplitBackward, OfACustomScheduleThatFailsOnOneWorkerIsRefusedOnAll) {
  std::vector<std::string> texts(2);
  on_workers(2, 1, [&](Worker& worker) {
    PipelineOptions options{.balance = {1, 1}, .micro_batches = 4, .schedule = Schedule::kCustom};
    options.custom_schedule = [&](const schedule::Placement& placement) {
      if (worker.rank() == 1) throw std::runtime_error("no such file");
      return schedule::gpipe(placement);
    };
    texts[worker.rank()] = error_text([&] { Pipeline pipe(worker, dense_chain(2), options); });
  });
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("no such file"));
}

TEST(SplitBackward, NeedsACustomScheduleExactlyIfItIsChosen) {
  std::vector<std::string> texts(2);
  on_workers(1, 1, [&](Worker& worker) {
    texts[0] = error_text([&] { Pipeline pipe(worker, dense_chain(1), {.schedule = Schedule::kCustom}); });
    PipelineOptions options = with_split_backwards({});
    options.schedule = Schedule::kZBH1;
    texts[1] = error_text([&] { Pipeline pipe(worker, dense_chain(1), options); });
  });
  for (const std::string& text : texts)
    EXPECT_THAT(text, HasSubstr("custom_schedule must be set if schedule is kCustom"));
}

}  // namespace
}  // namespace torchspan::pipeline::testing::split_backward_test
