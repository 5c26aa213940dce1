// Predicts students' ratings of lecturers with a table of embeddings on a parameter server and a dense part that
// DistributedDataParallel averages over the trainers:
//   tools/fetch-data insteval.csv
//   torchspan run -n 4 ddp_with_embedding
// Rank 0 is the master, the last rank holds the table, and the others train. With fewer than four workers, the master
// trains or holds the table, too. Afterwards, LibTorch trains the same model in one process.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <fmt/format.h>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <torchspan/core/observation.h>
#include <torchspan/data_parallel.h>
#include <torchspan/torchspan.h>

#include "ddp_with_embedding/model.h"
#include "ddp_with_embedding/training.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace ddp_with_embedding;

namespace {

/// Runs on each trainer, at the same time, with its part of each batch.
Report train(ts::Worker& worker, const ts::RRef<Table>& table, const Options& options) {
  const ts::Group& group = worker.extension<TrainerGroup>().group.value();
  const recommender::Split data = load(options);
  const Examples examples = examples_of(data.train, mean_of(data), options.shape.is_double);
  Dense dense(options.shape);
  ts::DistributedDataParallel model(dense, group);
  // The dense gradient is the mean over the trainers. The table takes one step for the gradient of each of them, so
  // these steps are shorter. While one trainer steps, the backward pass of another may still run: `hogwild` allows it, and
  // the result does not change, because the gradient of a table does not depend on its rows.
  ts::DistributedOptimizer optimizer(
      worker,
      {{.targets = {table}, .spec = ts::optim::SGD{.lr = options.table_lr / group.size()}, .hogwild = true},
       {.targets = {dense}, .spec = ts::optim::SGD{.lr = options.lr}}});
  Recorder recorder(worker, options, group.rank() == 0);
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const std::vector<at::Tensor> batches = batches_of(options, examples.size(), epoch);
    for (const at::Tensor& batch : batches) {
      const Examples mine =
          examples.at(batch.tensor_split(group.size())[static_cast<std::size_t>(group.rank())]);
      ts::Context context(worker);
      const at::Tensor embedded = table.rpc_sync(kTable.forward(), mine.bags);
      // Of a batch that the trainers cannot divide, some have more ratings than others.
      const at::Tensor loss =
          loss_of(model(embedded, mine.circumstances), mine.values, options.batch) * group.size();
      context.backward(loss);   // averages the dense gradients, and takes the table's to its owner
      optimizer.step(context);  // here and there
      group.barrier();          // the next lookups see the steps of all trainers
      recorder.step(epoch, batches.size(), loss.item<double>());
    }
  }
  return recorder.finish(dense);
}
constexpr ts::Function<train> kTrain{"train"};

void compare(const Options& options, const Examples& examples, const std::vector<Report>& reports,
             const std::vector<at::Tensor>& trained_table) {
  Table table(options.shape);
  Dense dense(options.shape);
  const Report expected = train_in_one_process(options, examples, table, dense);
  std::vector<double> losses(expected.losses.size());
  for (std::size_t step = 0; step < losses.size(); ++step) {
    for (const Report& report : reports)
      losses[step] += report.losses.at(step) / static_cast<double>(reports.size());
  }
  fmt::print(
      "{} {} against one process: losses differ by at most {:.1e}, the dense part by {:.1e}, the table by "
      "{:.1e}\n",
      reports.size(), reports.size() == 1 ? "trainer" : "trainers", difference(losses, expected.losses),
      difference(reports.front().dense, expected.dense), difference(trained_table, table->parameters()));
}

void lead(ts::Session& session, const Roles& roles, const Options& options, const recommender::Split& data) {
  if (options.batch < static_cast<std::int64_t>(roles.trainers.size())) {
    throw ts::Error(ts::ErrorKind::kInvalid,
                    fmt::format("--batch {}: each of the {} trainers needs a rating in each step",
                                options.batch, roles.trainers.size()));
  }
  const double mean = mean_of(data);
  const Shape shape = shape_for(data.train, options.shape);
  Options all = options;
  all.shape = shape;
  const ts::RemoteModule table(session.worker(), roles.server, kTable, shape);
  fmt::print("{} ratings; a table of {} x {} on {}, {} {}\n", data.train.size(), shape.rows, shape.width,
             table.owner_name(), roles.trainers.size(), roles.trainers.size() == 1 ? "trainer" : "trainers");
  std::vector<ts::Future<Report>> trainings;
  for (const int rank : roles.trainers) {
    trainings.push_back(
        session.worker().with({.timeout = std::chrono::hours(24)}).rpc_async(rank, kTrain, table, all));
  }
  const std::vector<Report> reports = ts::wait_all(trainings);
  fmt::print("{} steps of {} ratings in {:.1f} s\n", reports.front().losses.size(), options.batch,
             reports.front().seconds);
  for (const Report& report : reports) {
    if (difference(report.dense, reports.front().dense) != 0)
      throw std::logic_error("the replicas of the dense part differ");
  }
  Dense dense(shape, reports.front().dense);
  const Examples held_out = examples_of(data.held_out, mean, shape.is_double);
  fmt::print("root mean square error on {} held-out ratings\n", held_out.size());
  fmt::print("  the mean of all ratings             {:.4f}\n",
             recommender::root_mean_square(held_out.values));
  fmt::print("  biases of students and lecturers    {:.4f}\n", recommender::bias_only_error(data, 13, 5));
  fmt::print("  this model                          {:.4f}\n",
             root_mean_square_error(held_out, table.with({.no_grad = true}).forward(held_out.bags), dense));
  if (options.compare)
    compare(all, examples_of(data.train, mean, shape.is_double), reports,
            {table.parameter_rrefs().front().to_here()});
}

void run(const Options& options) {
  const auto worker_options = ts::WorkerOptions::from_env();
  const recommender::Split data = load(options);
  ts::FunctionTable functions;
  functions.add(kTable, kTrain);
  std::vector<std::unique_ptr<ts::rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<TrainerGroup>());
  ts::Session session(worker_options, functions, std::move(extensions));
  session.run([&](ts::Session& running) {
    const Roles roles(running.world_size());
    if (roles.trains(running.rank()))
      running.worker().extension<TrainerGroup>().group = running.group({.ranks = roles.trainers});
    running.worker().barrier();  // all trainers have their group
    if (running.rank() == 0) lead(running, roles, options, data);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "ddp_with_embedding", "Predicts ratings with a remote table and a data-parallel dense part.", argc,
      argv, add_options, run);
}
