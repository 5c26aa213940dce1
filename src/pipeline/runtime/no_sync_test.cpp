// StepOptions::no_sync: replicas accumulate gradients over several batches and exchange them once, against one process
// that computes the batches of all replicas together.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <torch/torch.h>

#include "pipeline/pipeline_test_util.h"

namespace torchspan::pipeline::testing::no_sync_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Multiplies by a transposed matrix, which may be tied to that of the first layer.
struct LastImpl : torch::nn::Module {
  LastImpl() { weight = register_parameter("weight", seeded({kWidth, kWidth}, 88)); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Last);

struct Grid {
  int replicas = 2;
  bool tied = false;
  bool even = false;  ///< the replicas' batches have equally many rows
  int workers() const { return 2 * replicas; }
};

Layers layers_of(const Grid& grid) {
  Layers layers;
  const auto first = layers.add<Dense>(1u);
  const auto last = layers.add<Last>();
  if (grid.tied) layers.tie({{first, "weight"}, {last, "weight"}});
  return layers;
}

PipelineOptions options_of(const Grid& grid) {
  return {.balance = {1, 1}, .replicas = grid.replicas, .micro_batches = 2};
}

std::int64_t rows_of(const Grid& grid, int replica, int step) {
  return grid.even ? 4 : 1 + (step * 3 + replica * 5) % 7;
}
at::Tensor rows_for(const Grid& grid, int replica, int step, std::uint64_t what) {
  return seeded({rows_of(grid, replica, step), kWidth},
                what + 10 * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(replica));
}
at::Tensor rows_for_all(const Grid& grid, int step, std::uint64_t what) {
  std::vector<at::Tensor> all;
  for (int replica = 0; replica < grid.replicas; ++replica)
    all.push_back(rows_for(grid, replica, step, what));
  return at::cat(all);
}

/// The same model in one process.
struct Twin {
  explicit Twin(const Grid& grid) : tied(grid.tied) {}
  void backward(const at::Tensor& x, const at::Tensor& y, double factor = 1) {
    const at::Tensor weight = tied ? dense->weight : last->weight;
    (mean_square(at::matmul(dense->forward(x), weight.t()), y) * factor).backward();
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all{dense->weight, dense->bias};
    if (!tied) all.push_back(last->weight);
    return all;
  }
  void expect_gradients_of(const Pipeline& pipe) const {
    expect_gradients(pipe, {dense.ptr(), tied ? nullptr : last.ptr()});
    const auto module = tied ? pipe.module(1) : nullptr;
    if (module) expect_close(module->parameters()[0].grad(), dense->weight.grad());
  }
  bool tied;
  Dense dense{1u};
  Last last;
};

/// One worker's pipeline and the same training in one process.
class Pair {
 public:
  Pair(Worker& worker, Grid shape)
      : grid(shape),
        pipe(worker, layers_of(grid), options_of(grid)),
        optimizer(pipe.parameters(), torch::optim::SGDOptions(0.1)),
        twin(grid),
        plain(twin.parameters(), torch::optim::SGDOptions(0.1)) {}

  double step(int number, bool no_sync) {
    const double loss =
        pipe.train_step(rows_for(grid, pipe.replica(), number, 1000),
                        rows_for(grid, pipe.replica(), number, 2000), mean_square, {.no_sync = no_sync});
    twin.backward(rows_for_all(grid, number, 1000), rows_for_all(grid, number, 2000));
    return loss;
  }
  void zero_grad() {
    optimizer.zero_grad();
    plain.zero_grad();
  }

  const Grid grid;
  Pipeline pipe;
  torch::optim::SGD optimizer;
  Twin twin;
  torch::optim::SGD plain;
};

TEST(NoSync, ExchangesTheGradientsOfSeveralStepsAtTheLast) {
  for (const Grid& grid : {Grid{2}, Grid{2, true}, Grid{3, true}, Grid{2, false, true}}) {
    SCOPED_TRACE(fmt::format("{} replicas, tied {}, even {}", grid.replicas, grid.tied, grid.even));
    std::vector<at::Tensor> weights(static_cast<std::size_t>(grid.workers()));
    on_workers(grid.workers(), 1, [&](Worker& worker) {
      Pair pair(worker, grid);
      int number = 0;
      for (int update = 0; update < 3; ++update) {
        // In the second update there are exchanged gradients before those that are not.
        if (update == 1) pair.step(number++, false);
        for (int part = 0; part < update + 1; ++part) pair.step(number++, true);
        pair.step(number++, false);
        pair.twin.expect_gradients_of(pair.pipe);
        pair.optimizer.step();
        pair.plain.step();
        pair.zero_grad();
      }
      weights[worker.rank()] = pair.pipe.parameters()[0].detach().clone();
    });
    for (std::size_t rank = 2; rank < weights.size(); ++rank)
      EXPECT_TRUE(at::equal(weights[rank], weights[rank % 2])) << "rank " << rank;
  }
}

TEST(NoSync, LeavesEachReplicaItsOwnGradientsUntilThen) {
  const Grid grid{2, true};
  on_workers(grid.workers(), 1, [&](Worker& worker) {
    Pair pair(worker, grid);
    pair.step(1, true);
    Twin alone(grid);
    const int mine = pair.pipe.replica();
    const double mean_rows = static_cast<double>(rows_of(grid, 0, 1) + rows_of(grid, 1, 1)) / 2;
    ASSERT_NE(rows_of(grid, 0, 1), rows_of(grid, 1, 1));
    alone.backward(rows_for(grid, mine, 1, 1000), rows_for(grid, mine, 1, 2000),
                   static_cast<double>(rows_of(grid, mine, 1)) / mean_rows);
    alone.expect_gradients_of(pair.pipe);
    // They are gone if the program drops them.
    pair.zero_grad();
    pair.step(2, false);
    pair.twin.expect_gradients_of(pair.pipe);
  });
}

TEST(NoSync, KeepsThemIfAStepFails) {
  const Grid grid{2};
  on_workers(grid.workers(), 1, [&](Worker& worker) {
    Pair pair(worker, grid);
    pair.step(0, true);
    for (const bool no_sync : {true, false}) {
      EXPECT_THAT(error_text([&] {
                    pair.pipe.train_step(seeded({3, kWidth}, 1),
                                         seeded({worker.rank() == 3 ? 2 : 3, kWidth}, 2), mean_square,
                                         {.no_sync = no_sync});
                  }),
                  HasSubstr("the target has 2 rows"));
    }
    pair.step(1, true);
    pair.step(2, false);
    pair.twin.expect_gradients_of(pair.pipe);
  });
}

TEST(NoSync, EndsWithForwardAndBackwardApart) {
  const Grid grid{2};
  on_workers(grid.workers(), 1, [&](Worker& worker) {
    Pair pair(worker, grid);
    pair.step(0, true);
    const Batch output = pair.pipe.forward(rows_for(grid, pair.pipe.replica(), 1, 1000));
    if (output.size() > 0)
      mean_square(output.tensor(), rows_for(grid, pair.pipe.replica(), 1, 2000)).backward();
    pair.pipe.backward();
    pair.twin.backward(rows_for_all(grid, 1, 1000), rows_for_all(grid, 1, 2000));
    pair.twin.expect_gradients_of(pair.pipe);
  });
}

TEST(NoSync, IsRefusedWhereGradientsWouldDiffer) {
  const Grid grid{2};
  on_workers(grid.workers(), 1, [&](Worker& worker) {
    Pair pair(worker, grid);
    EXPECT_THAT(error_text([&] { pair.step(0, pair.pipe.replica() == 0); }),
                AllOf(HasSubstr("StepOptions::no_sync"), HasSubstr("true"), HasSubstr("of replica 1")));
    pair.zero_grad();
    pair.step(1, true);
    EXPECT_THAT(error_text([&] { pair.pipe.clip_grad_norm(1); }), HasSubstr("no_sync"));
    pair.step(2, false);
    pair.pipe.clip_grad_norm(1);
  });
}

TEST(NoSync, ChangesNothingWithoutReplicas) {
  const Grid grid{1};
  on_workers(grid.workers(), 1, [&](Worker& worker) {
    Pair pair(worker, grid);
    pair.step(0, true);
    pair.twin.expect_gradients_of(pair.pipe);
    pair.pipe.clip_grad_norm(1e9);
    pair.step(1, false);
    pair.twin.expect_gradients_of(pair.pipe);
  });
}

}  // namespace
}  // namespace torchspan::pipeline::testing::no_sync_test
