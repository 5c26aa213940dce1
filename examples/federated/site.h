#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/rpc/rref.h>
#include <torchspan/rpc/worker.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/model.h"
#include "federated/options.h"

namespace federated {

/// Which images a site keeps: those of every `sites`-th client, beginning with client `index`.
struct SiteOptions {
  static constexpr torchspan::FixedString kWireName = "SiteOptions";
  std::string data;
  std::int64_t limit = 0, clients = 1, shards = 1;
  std::uint64_t seed = 0;
  std::int64_t index = 0, sites = 1;
};

/// Holds the images of some clients. No call returns them.
class SiteImpl : public torch::nn::Module {
 public:
  explicit SiteImpl(const SiteOptions& options);
  const fashion_mnist::Dataset& client(std::int64_t number) const;

 private:
  std::map<std::int64_t, fashion_mnist::Dataset> clients_;
};
TORCH_MODULE(Site);

/// What a client does in a round.
struct Task {
  static constexpr torchspan::FixedString kWireName = "Task";
  std::int64_t client = 0, epochs = 1, batch = 0;
  double lr = 0;
  std::uint64_t seed = 0;
  std::vector<at::Tensor> parameters;
  bool is_slow = false, dies = false;
};

/// Steps of plain gradient descent with the mean loss of `batch` images each (0: all of them). `between` runs before each
/// step; false ends the training. Throws torchspan::Error{kInvalid} when a loss is not finite.
void descend(fashion_mnist::ConvNet network, const fashion_mnist::Dataset& data, const Task& task,
             const std::function<bool()>& between);

/// A network with these parameters, and of their type.
fashion_mnist::ConvNet network_with(const std::vector<at::Tensor>& parameters);

/// Trains the task's parameters with its client's images; runs on the site. Ends early when its caller no longer waits.
Update train_client(torchspan::Worker& worker, const torchspan::RRef<Site>& site, const Task& task);

inline constexpr torchspan::Class<Site, SiteOptions> kSite{"Site"};
inline constexpr torchspan::Function<train_client> kTrainClient{"train_client"};

}  // namespace federated
