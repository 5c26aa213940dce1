#include "federated/federation.h"

#include <chrono>
#include <fmt/format.h>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/core/error.h>

namespace federated {
namespace {

using torchspan::Error;
using torchspan::ErrorKind;

std::uint64_t seed_of(const Options& options, std::int64_t round, std::int64_t client) {
  return options.seed * 1'000'003 + static_cast<std::uint64_t>(round * options.clients + client) * 1009;
}

}  // namespace

std::vector<at::Tensor> first_parameters(const Options& options) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : fashion_mnist::ConvNet(options.seed)->parameters())
    parameters.push_back(parameter.detach().to(options.is_double ? at::kDouble : at::kFloat));
  return parameters;
}

Federation::Federation(torchspan::Worker& worker, const Options& options)
    : worker_(worker), options_(options), first_(first_parameters(options)), parameters_(first_) {}

int Federation::rank_of(std::int64_t client) const {
  const int world = worker_.world_size();
  return static_cast<int>(client % sites_of(world)) + (world > 1 ? 1 : 0);
}

Task Federation::task_for(std::int64_t client, std::int64_t round) const {
  const int rank = rank_of(client);
  return {.client = client,
          .epochs = options_.epochs,
          .batch = options_.batch,
          .lr = options_.lr,
          .seed = seed_of(options_, round, client),
          .parameters = parameters_,
          .is_slow = rank == options_.slow_rank,
          .dies = rank == 1 && round == options_.die_at};
}

torchspan::Future<Update> Federation::start(const Task& task, torchspan::Duration timeout) {
  const int rank = rank_of(task.client);
  const auto caller = worker_.with({.timeout = timeout});
  if (!sites_.contains(rank)) {
    const std::int64_t sites = sites_of(worker_.world_size());
    sites_[rank] = caller.remote(rank, kSite,
                                 SiteOptions{.data = options_.data,
                                             .limit = options_.limit,
                                             .clients = options_.clients,
                                             .shards = options_.shards,
                                             .seed = options_.seed,
                                             .index = task.client % sites,
                                             .sites = sites});
  }
  return caller.rpc_async(rank, kTrainClient, sites_[rank], task);
}

std::string Federation::collect(const torchspan::Future<Update>& training, std::int64_t client,
                                std::vector<Update>& updates) {
  const int rank = rank_of(client);
  try {
    const Update update = training.wait();
    if (update.images == 0) return fmt::format("client {} on rank {} is late", client, rank);
    updates.push_back(update);
    return {};
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimedOut)
      return fmt::format("client {} on rank {} is late", client, rank);
    if (error.kind() != ErrorKind::kDisconnected) throw;
    sites_.erase(rank);
    return fmt::format("client {} on rank {} is gone", client, rank);
  }
}

Federation::Round Federation::run(std::int64_t number) {
  const at::Tensor drawn =
      at::randperm(options_.clients, at::detail::createCPUGenerator(seed_of(options_, number, -1)),
                   at::TensorOptions(at::kLong))
          .slice(0, 0, options_.per_round);
  std::map<std::int64_t, torchspan::Future<Update>> trainings;
  for (std::int64_t i = 0; i < drawn.numel(); ++i) {
    const auto client = drawn[i].item<std::int64_t>();
    trainings.emplace(client, start(task_for(client, number), options_.limit_of_round()));
  }
  Round round;
  std::vector<Update> updates;
  for (const auto& [client, training] : trainings) {
    const std::string absence = collect(training, client, updates);
    if (absence.empty()) {
      round.clients.push_back(client);
      round.images += updates.back().images;
    } else {
      round.absences += (round.absences.empty() ? "" : ", ") + absence;
    }
  }
  if (!updates.empty()) parameters_ = average(updates);
  return round;
}

Update Federation::train_alone(std::int64_t client, std::int64_t rounds) {
  Task task = task_for(client, 0);
  task.epochs *= rounds;
  task.parameters = first_;
  task.is_slow = false;
  return start(task, std::chrono::hours(24)).wait();
}

void serve(torchspan::Worker& worker) {
  for (;;) {
    try {
      return worker.barrier({worker.info(0).name, worker.name()});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalid) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

void release_workers(torchspan::Worker& worker) {
  for (const torchspan::WorkerInfo& other : worker.workers()) {
    if (static_cast<int>(other.rank) == worker.rank()) continue;
    try {
      worker.barrier({worker.name(), other.name}, std::chrono::seconds(30));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDisconnected) throw;
      fmt::print("{} is gone\n", other.name);
    }
  }
}

}  // namespace federated
