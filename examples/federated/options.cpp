#include "federated/options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/core/error.h>

namespace federated {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw torchspan::Error(torchspan::ErrorKind::kInvalid, text);
}

}  // namespace

void add_options(CLI::App& app, Options& options) {
  constexpr std::int64_t kZero = 0, kOne = 1, kMost = 1'000'000'000;
  const auto count = [&](const char* name, std::int64_t& value, std::int64_t least, const char* text) {
    app.add_option(name, value, text)->check(CLI::Range(least, kMost))->capture_default_str();
  };
  app.add_option("--data", options.data, "folder of the four IDX files, gzipped or not")
      ->capture_default_str();
  count("--limit", options.limit, kZero, "maximum number of images of each split; 0: all");
  count("--rounds", options.rounds, kOne, "times that clients train and the server averages");
  count("--clients", options.clients, kOne, "parts of the images, each of which stays on one worker");
  count("--per-round", options.per_round, kOne, "clients that are drawn for a round");
  count("--shards", options.shards, kOne, "pieces of the images, sorted by class, that a client has");
  count("--epochs", options.epochs, kOne, "of a client in a round");
  count("--batch", options.batch, kZero, "images in a step of a client; 0: all that it has");
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_option("--lr", options.lr, "learning rate of the clients")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str();
  app.add_option("--deadline", options.deadline, "seconds after which a round goes on without a client")
      ->check(CLI::Range(0.01, 1e6))
      ->capture_default_str();
  app.add_flag("--double", options.is_double, "compute with 64 bits");
  app.add_flag("!--no-compare", options.compare, "do not train without the federation afterwards");
  app.add_option("--slow-rank", options.slow_rank,
                 "for a demonstration: each step of this rank's clients takes a second longer");
  app.add_option("--die-at", options.die_at,
                 "for a demonstration: rank 1 kills itself when it trains in this round");
}

void check(const Options& options, std::int64_t sites) {
  if (options.clients < sites)
    refuse(fmt::format("--clients {}: each of the {} workers needs one", options.clients, sites));
  if (options.per_round > options.clients)
    refuse(fmt::format("--per-round {}: there are {} clients", options.per_round, options.clients));
}

std::vector<at::Tensor> partition(const at::Tensor& labels, std::int64_t clients, std::int64_t shards,
                                  std::uint64_t seed) {
  if (clients * shards > labels.numel()) {
    refuse(fmt::format("--clients {} with --shards {}: there are only {} images", clients, shards,
                       labels.numel()));
  }
  const at::Tensor by_label = std::get<1>(labels.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false));
  const std::vector<at::Tensor> pieces = by_label.tensor_split(clients * shards);
  const at::Tensor order =
      at::randperm(clients * shards, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  std::vector<at::Tensor> parts;
  for (std::int64_t client = 0; client < clients; ++client) {
    std::vector<at::Tensor> mine;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const auto piece = order[client * shards + shard].item<std::int64_t>();
      mine.push_back(pieces[static_cast<std::size_t>(piece)]);
    }
    parts.push_back(at::cat(mine));
  }
  return parts;
}

std::vector<at::Tensor> average(const std::vector<Update>& updates) {
  double images = 0;
  for (const Update& update : updates) images += static_cast<double>(update.images);
  std::vector<at::Tensor> mean;
  for (const Update& update : updates) {
    const double weight = static_cast<double>(update.images) / images;
    for (std::size_t i = 0; i < update.parameters.size(); ++i) {
      if (mean.size() == i) mean.push_back(at::zeros_like(update.parameters[i]));
      mean[i].add_(update.parameters[i], weight);
    }
  }
  return mean;
}

}  // namespace federated
