// Predicts students' ratings of lecturers from embeddings on two parameter servers, which several trainers update
// asynchronously:
//   tools/fetch-data insteval.csv
//   torchspan run -n 4 recommender
// The last two workers hold the tables, and all others train. With fewer than three workers, a worker has several
// roles.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fmt/format.h>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <torchspan/core/progress.h>
#include <torchspan/torchspan.h>

#include "recommender/model.h"
#include "recommender/ratings.h"

namespace ts = torchspan;
using namespace recommender;

namespace {

struct Options {
  std::string data = kDefaultFile;
  std::int64_t epochs = 5;
  std::int64_t batch = 512;
  std::int64_t seed = 1;
  double lr = 0.02;
};

/// One trainer's part of the work: every `count`-th batch, beginning with batch `index`.
struct Part {
  Options options;
  std::int64_t index = 0, count = 1;
};

struct Report {
  std::int64_t ratings = 0;
  double seconds = 0;
};

}  // namespace

template <>
struct ts::Wire<Options> : ts::WireStruct<Options, "Options", &Options::data, &Options::epochs,
                                          &Options::batch, &Options::seed, &Options::lr> {};
template <>
struct ts::Wire<Part> : ts::WireStruct<Part, "Part", &Part::options, &Part::index, &Part::count> {};
template <>
struct ts::Wire<Report> : ts::WireStruct<Report, "Report", &Report::ratings, &Report::seconds> {};

namespace {

void add_options(CLI::App& app, Options& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000'000;
  app.add_option("--data", options.data, "CSV file of ratings")->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(CLI::Range(kOne, kMost))->capture_default_str();
  app.add_option("--batch", options.batch, "ratings per step")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "seed of the held-out ratings and of the order")
      ->capture_default_str();
  app.add_option("--lr", options.lr, "initial learning rate")
      ->check(CLI::Range(1e-9, 1e3))
      ->capture_default_str();
}

std::vector<at::Tensor> batches_of(const Ratings& ratings, const Options& options, std::int64_t epoch) {
  const auto seed = static_cast<std::uint64_t>(options.seed + epoch);
  return at::randperm(ratings.size(), at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong))
      .split(options.batch);
}

/// Shows the progress on one of the trainers.
class Display {
 public:
  Display(ts::Worker& worker, const Part& part, std::int64_t steps)
      : progress_(worker), shown_(part.index == 0) {
    line_.epochs = part.options.epochs;
    line_.steps = steps;
    line_.unit = "ratings";
    line_.text = part.count == 1 ? "" : "(one trainer of " + std::to_string(part.count) + ")";
  }
  void step(std::int64_t epoch, double loss, std::int64_t ratings) {
    report_.ratings += ratings;
    report_.seconds = ts::to_seconds(progress_.elapsed());
    line_.step = epoch == line_.epoch ? line_.step + 1 : 1;
    line_.epoch = epoch;
    line_.loss = loss;
    line_.rate = static_cast<double>(report_.ratings) / report_.seconds;
    if (shown_) progress_.report(line_);
  }
  Report finish() {
    if (shown_) progress_.finish();
    return report_;
  }

 private:
  ts::Progress progress_;
  ts::ProgressReport line_;
  Report report_;
  const bool shown_;
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
  ts::optim::DistributedOptimizer optimizer(worker,
                                            {{.targets = {model.students, model.lecturers, model.profiles},
                                              .spec = ts::optim::SparseAdam{.lr = options.lr},
                                              .hogwild = true}});
  const std::int64_t batches = (ratings.size() + options.batch - 1) / options.batch;
  const std::int64_t mine = std::max<std::int64_t>(1, (batches - part.index + part.count - 1) / part.count);
  ts::optim::LRScheduler schedule(
      optimizer, ts::optim::CosineAnnealingLR{.t_max = mine * options.epochs, .eta_min_factor = 0.02});
  Display display(worker, part, mine);
  for (std::int64_t epoch = 1; epoch <= options.epochs; ++epoch) {
    const auto order = batches_of(ratings, options, epoch);
    for (auto i = static_cast<std::size_t>(part.index); i < order.size();
         i += static_cast<std::size_t>(part.count)) {
      const Ratings batch = ratings.at(order[i]);
      ts::autograd::Context context(worker);
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
  const Priors priors;
  fmt::print("root mean square error on {} held-out ratings\n", data.held_out.size());
  fmt::print("  the mean of all ratings             {:.4f}\n",
             root_mean_square(data.held_out.values - data.train.values.mean()));
  fmt::print("  biases of students and lecturers    {:.4f}\n",
             bias_only_error(data, priors.student, priors.lecturer));
  fmt::print("  this model                          {:.4f}\n", error);
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
  CLI::App app("Predicts ratings with embeddings on parameter servers and several trainers.");
  Options options;
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);  // the workers share the cores
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "recommender: %s\n", error.what());
    return 1;
  }
  return 0;
}
