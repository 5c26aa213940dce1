// Trains a small network on images that do not leave their owners. Each client has images of few classes; in each round,
// some clients train the network with their own images, and rank 0 averages the results (federated averaging):
//   torchspan run -n 3 federated
// The clients are spread over the other workers. A round goes on without clients that are late or whose worker died:
//   torchspan run -n 4 --max-replacements 10 federated --die-at 5 --slow-rank 2 --deadline 10
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <exception>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/core/observation.h>
#include <torchspan/torchspan.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "fashion_mnist/training.h"
#include "federated/federation.h"
#include "federated/options.h"
#include "federated/site.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace federated;
using fashion_mnist::ConvNet;
using fashion_mnist::Dataset;

namespace {

double accuracy_of(const Dataset& test, const std::vector<at::Tensor>& parameters) {
  ConvNet network = network_with(parameters);
  network->to(at::kFloat);
  return 100 * fashion_mnist::accuracy(test, network);
}

double difference(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double most = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    most = std::max(most, (left[i] - right.at(i)).abs().max().item<double>());
  return most;
}

/// Trains without the federation: one client alone, and one process that has all images.
void compare(Federation& federation, const Options& options, const Dataset& test, std::int64_t images) {
  const Update alone = federation.train_alone(0, options.rounds);
  const at::Tensor known = at::isin(test.labels, at::tensor(alone.classes, at::kLong));
  fmt::print("client 0 alone: {:.2f} %; its images show classes {}, as {:.2f} % of the test images do\n",
             accuracy_of(test, alone.parameters), fmt::join(alone.classes, ", "),
             100 * known.to(at::kDouble).mean().item<double>());
  Dataset all = fashion_mnist::load(options.data, fashion_mnist::Split::kTrain);
  if (options.limit > 0) all = all.first(options.limit);
  const ConvNet network = network_with(first_parameters(options));
  Task task;
  task.epochs = std::max<std::int64_t>(1, images / all.size());
  task.batch = options.batch;
  task.lr = options.lr;
  task.seed = options.seed;
  descend(network, all, task, [] { return true; });
  fmt::print("one process with all images: {:.2f} %\n", accuracy_of(test, network->parameters()));
  if (options.is_gradient_descent()) {
    fmt::print("federation and one process take the same steps; parameters differ by at most {:.1e}\n",
               difference(federation.parameters(), network->parameters()));
  }
}

void lead(ts::Session& session, const Options& options, const Dataset& test) {
  const std::int64_t sites = Federation::sites_of(session.world_size());
  Federation federation(session.worker(), options);
  fmt::print("{} clients on {} {}; {} of them in a round\n", options.clients, sites,
             sites == 1 ? "worker" : "workers", options.per_round);
  ts::Progress progress(session);
  ts::ProgressReport shown;
  shown.steps = options.rounds;
  shown.unit = "images";
  std::int64_t images = 0;
  for (shown.step = 1; shown.step <= options.rounds; ++shown.step) {
    const Federation::Round round = federation.run(shown.step);
    images += round.images;
    fmt::print("round {:3}: test accuracy {:5.2f} %, {} clients{}{}\n", shown.step,
               accuracy_of(test, federation.parameters()), round.clients.size(),
               round.absences.empty() ? "" : "; ", round.absences);
    shown.rate = static_cast<double>(images) / ts::to_seconds(progress.elapsed());
    progress.report(shown);
  }
  progress.finish();
  if (options.compare) compare(federation, options, test, images);
}

/// A worker that died in the last moment is an error of shutdown(), but the training is complete.
void shut_down(ts::Session& session) {
  try {
    session.shutdown();
  } catch (const ts::Error& error) {
    if (error.kind() != ts::ErrorKind::kDisconnected) throw;
    fmt::print(stderr, "rank {}: {}\n", session.rank(), error.message());
  }
}

void run(const Options& options) {
  const auto worker_options = ts::WorkerOptions::from_env();
  Dataset test = fashion_mnist::load(options.data, fashion_mnist::Split::kTest);
  if (options.limit > 0) test = test.first(options.limit);
  ts::FunctionTable functions;
  functions.add(kSite, kTrainClient);
  ts::Session session(worker_options, functions);
  try {
    if (session.rank() == 0) {
      check(options, Federation::sites_of(session.world_size()));
      lead(session, options, test);
      release_workers(session.worker());
    } else {
      serve(session.worker());
    }
  } catch (...) {
    session.abort(std::current_exception());
    throw;
  }
  shut_down(session);
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>("federated",
                                        "Trains a small network on images that do not leave their owners.",
                                        argc, argv, add_options, run);
}
