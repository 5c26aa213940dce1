#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/time.h>
#include <torchspan/wire.h>

#include "fashion_mnist/dataset.h"

namespace CLI {
class App;
}

namespace federated {

struct Options {
  std::string data = fashion_mnist::kDefaultFolder;
  std::int64_t limit = 20'000;  ///< images of each split; 0: all
  std::int64_t rounds = 20, clients = 20, per_round = 10, shards = 2;
  std::int64_t epochs = 1, batch = 32;  ///< of a client in a round; batch 0: all its images
  std::uint64_t seed = 1;
  double lr = 0.05, deadline = 60;  ///< seconds
  bool is_double = false, compare = true;
  int slow_rank = -1;
  std::int64_t die_at = -1;

  /// Whether a round is one step of gradient descent with all images: each client takes one step with all of its own.
  bool is_gradient_descent() const { return batch == 0 && epochs == 1 && per_round == clients; }
  torchspan::Duration limit_of_round() const {
    return std::chrono::milliseconds(static_cast<std::int64_t>(deadline * 1000));
  }
};
void add_options(CLI::App& app, Options& options);
/// Throws torchspan::Error{kInvalid} for options that do not fit each other or the number of workers with clients.
void check(const Options& options, std::int64_t sites);

/// The positions of each client's images. Sorted by label and cut into clients * shards pieces, of which each client gets
/// `shards`, drawn from the seed, the images of a client show few classes (McMahan et al., "Communication-efficient
/// learning of deep networks from decentralized data", 2017). Throws torchspan::Error{kInvalid} for too few images.
std::vector<at::Tensor> partition(const at::Tensor& labels, std::int64_t clients, std::int64_t shards,
                                  std::uint64_t seed);

/// What a client returns.
struct Update {
  static constexpr torchspan::FixedString kWireName = "Update";
  std::int64_t images = 0;            ///< 0: it stopped, because its caller no longer waits
  std::vector<std::int64_t> classes;  ///< of the images, ascending
  std::vector<at::Tensor> parameters;
};
/// The mean of the clients' parameters, weighted by their numbers of images.
std::vector<at::Tensor> average(const std::vector<Update>& updates);

}  // namespace federated
