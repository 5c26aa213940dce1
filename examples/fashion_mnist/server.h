#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/rpc/function.h>
#include <torchspan/wire.h>

#include "fashion_mnist/model.h"

namespace fashion_mnist {

/// What the server returns for some images.
struct Answer {
  std::int64_t version = 0;
  at::Tensor classes;  ///< int64 [n]
};

/// Classifies images with the newest network that a trainer has published, version 0 before the first one. Calls run
/// at the same time; a call that has begun keeps its version. Thread-safe.
class ServerImpl : public torch::nn::Module {
 public:
  explicit ServerImpl(std::uint64_t seed);

  Answer classify(const at::Tensor& images) const;
  /// Later calls use a network with these parameters, in the order of ConvNet's. Older versions than the current one are
  /// ignored.
  void publish(std::int64_t version, const std::vector<at::Tensor>& parameters);

 private:
  struct Version {
    std::int64_t number;
    ConvNet network;
  };
  std::shared_ptr<const Version> current() const;

  mutable std::mutex mutex_;
  std::shared_ptr<const Version> current_;  ///< guarded by mutex_
};
TORCH_MODULE(Server);

inline constexpr torchspan::Class<Server, std::uint64_t> kServer{"Server"};
inline constexpr torchspan::Function<&ServerImpl::classify> kClassify{"Server.classify"};
inline constexpr torchspan::Function<&ServerImpl::publish> kPublish{"Server.publish"};

}  // namespace fashion_mnist

template <>
struct torchspan::Wire<fashion_mnist::Answer>
    : torchspan::WireStruct<fashion_mnist::Answer, "Answer", &fashion_mnist::Answer::version,
                            &fashion_mnist::Answer::classes> {};
