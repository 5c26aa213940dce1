// Predicts students' ratings of lecturers from embeddings on two parameter servers, which several trainers update
// asynchronously:
//   tools/fetch-data insteval.csv
//   torchspan run -n 4 recommender
// The last two workers hold the tables, and all others train. With fewer than three workers, a worker has several
// roles.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/torchspan.h>

#include "programs/run_program.h"
#include "recommender/model.h"
#include "recommender/options.h"
#include "recommender/ratings.h"
#include "recommender/report.h"

namespace ts = torchspan;
using namespace recommender;

namespace {

/// One trainer's part of the work: every `count`-th batch, beginning with batch `index`.
struct Part {
  static constexpr ts::FixedString kWireName = "Part";
  Options options;
  std::int64_t index = 0, count = 1;
};

void check_finite(double value, const std::string& what) {
  if (!std::isfinite(value))
    throw ts::Error(ts::ErrorKind::kInvalid,
                    what + " is not a finite number: lower --lr, or look for ratings out of range");
}

/// Runs one trainer, concurrently with all others: no update is lost, and no trainer waits for another.
Report train(ts::Worker& worker, const Model& model, const Part& part) {
  const Options& options = part.options;
  const Ratings ratings = split(load(options.data), static_cast<std::uint64_t>(options.seed)).train;
  const Occurrences all(ratings);
  ts::DistributedOptimizer optimizer(worker, {{.targets = {model.students, model.lecturers, model.profiles},
                                               .spec = ts::optim::SparseAdam{.lr = options.lr},
                                               .hogwild = true}});
  const std::int64_t batches = (ratings.size() + options.batch - 1) / options.batch;
  const std::int64_t mine = std::max<std::int64_t>(1, (batches - part.index + part.count - 1) / part.count);
  ts::optim::LRScheduler schedule(
      optimizer, ts::optim::CosineAnnealingLR{.t_max = mine * options.epochs, .eta_min_factor = 0.02});
  const std::string others = part.count == 1 ? "" : fmt::format("(one trainer of {})", part.count);
  Display display(worker, {.epochs = options.epochs, .steps = mine, .text = others}, part.index == 0);
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const auto seed = static_cast<std::uint64_t>(options.seed + epoch);
    const auto order = shuffled_batches(ratings.size(), options.batch, seed);
    for (auto i = static_cast<std::size_t>(part.index); i < order.size();
         i += static_cast<std::size_t>(part.count)) {
      const Ratings batch = ratings.at(order[i]);
      ts::Context context(worker);
      const at::Tensor loss = loss_of(model.predict(batch), batch, all);
      check_finite(loss.item<double>(), fmt::format("the loss in epoch {}", epoch));
      context.backward(loss);
      optimizer.step(context);
      schedule.step();
      display.step(epoch, loss.item<double>(), batch.size());
    }
  }
  return display.finish();
}

constexpr ts::Function<train> kTrain{"train"};

double held_out_error(const Model& model, const Ratings& ratings) {
  model.set_training(false);
  return root_mean_square(model.predict(ratings).values - ratings.values);
}

/// Assigns roles: with three workers or more, the last two hold the tables.
struct Roles {
  explicit Roles(std::uint32_t world)
      : students(world < 3 ? world - 1 : world - 2),
        lecturers(world - 1),
        trainers(world < 3 ? 1 : world - 2) {}
  std::uint32_t students, lecturers, trainers;
};

Model make_model(ts::Worker& worker, const Roles& roles, const Ratings& train) {
  return {.students = worker.remote(roles.students, kTable, train.student_count, 1),
          .lecturers =
              worker.remote(roles.lecturers, kTable, train.lecturer_count, 1 + train.circumstance_count()),
          .profiles = worker.remote(roles.students, kTable, train.profile_count, 1),
          .mean = train.values.mean().item<double>()};
}

void lead(ts::Session& session, const Options& options, const Split& data) {
  ts::Worker& worker = session.worker();
  const Roles roles(session.world_size());
  const Model model = make_model(worker, roles, data.train);
  fmt::print("{} ratings of {} lecturers by {} students; {} are held out\n",
             data.train.size() + data.held_out.size(), data.train.lecturer_count, data.train.student_count,
             data.held_out.size());
  fmt::print("students and circumstances on {}, lecturers on {}, {} {}\n", model.students.owner_name(),
             model.lecturers.owner_name(), roles.trainers, roles.trainers == 1 ? "trainer" : "trainers");
  std::vector<ts::Future<Report>> trainings;
  for (std::uint32_t rank = 0; rank < roles.trainers; ++rank) {
    const Part part{options, rank, roles.trainers};
    trainings.push_back(
        worker.with({.timeout = std::chrono::hours(24)}).rpc_async(rank, kTrain, model, part));
  }
  for (std::uint32_t rank = 0; rank < roles.trainers; ++rank) {
    const Report report = trainings[rank].wait();
    fmt::print("trainer {}: {} ratings in {:.1f} s, {:.0f} ratings/s\n", rank, report.ratings, report.seconds,
               static_cast<double>(report.ratings) / std::max(report.seconds, 1e-9));
  }
  const double error = held_out_error(model, data.held_out);
  check_finite(error, "the error on held-out ratings");
  print_errors(data, error);
}

void run(const Options& options) {
  const auto worker_options = ts::WorkerOptions::from_env();
  // Detects wrong data before it waits for the other workers.
  const Split data = split(load(options.data), static_cast<std::uint64_t>(options.seed));
  ts::FunctionTable functions;
  functions.add(kTable, kLookUp, kSetTraining, kTrain);
  ts::Session session(worker_options, functions);
  if (session.rank() == 0) lead(session, options, data);
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "recommender", "Predicts ratings with embeddings on parameter servers and several trainers.", argc,
      argv, add_options, run);
}
