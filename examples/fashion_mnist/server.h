#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/batcher.h>
#include <torchspan/rpc/function.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/wire.h>

#include "fashion_mnist/model.h"

namespace fashion_mnist {

/// What the server returns for some images.
struct Answer {
  static constexpr torchspan::FixedString kWireName = "Answer";
  std::int64_t version = 0;
  at::Tensor classes;  ///< int64 [n]
};

/// Classifies images with the newest network that a trainer has published, version 0 before the first one. Calls that come
/// at about the same time are answered together, by one forward of one version. Thread-safe.
class ServerImpl : public torch::nn::Module {
 public:
  ServerImpl(const torchspan::Worker& worker, std::uint64_t seed);

  /// Fails with kOverloaded if too many calls wait.
  torchspan::Future<Answer> classify(const at::Tensor& images);
  /// Later calls use a network with these parameters, in the order of ConvNet's. Older versions than the current one are
  /// ignored.
  void publish(std::int64_t version, const std::vector<at::Tensor>& parameters);

 private:
  struct Version {
    std::int64_t number;
    ConvNet network;
  };
  std::vector<Answer> answer(const std::vector<at::Tensor>& calls) const;

  mutable std::mutex mutex_;
  std::shared_ptr<const Version> current_;  ///< guarded by mutex_
  torchspan::Batcher<at::Tensor, Answer> batcher_;
};
TORCH_MODULE(Server);

/// Makes a server on the worker that runs this.
Server make_server(torchspan::Worker& worker, std::uint64_t seed);
inline constexpr torchspan::Function<make_server> kMakeServer{"make_server"};
inline constexpr torchspan::Function<&ServerImpl::classify> kClassify{"Server.classify"};
inline constexpr torchspan::Function<&ServerImpl::publish> kPublish{"Server.publish"};

}  // namespace fashion_mnist
