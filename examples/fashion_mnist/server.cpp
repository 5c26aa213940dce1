#include "fashion_mnist/server.h"

#include <fmt/format.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <torchspan/core/error.h>

namespace fashion_mnist {

ServerImpl::ServerImpl(std::uint64_t seed)
    : current_(std::make_shared<const Version>(Version{0, ConvNet(seed, c10::kCPU)})) {}

std::shared_ptr<const ServerImpl::Version> ServerImpl::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

Answer ServerImpl::classify(const at::Tensor& images) const {
  const auto version = current();
  const c10::NoGradGuard off;
  return {version->number, version->network.ptr()->forward(images).argmax(1)};
}

void ServerImpl::publish(std::int64_t version, const std::vector<at::Tensor>& parameters) {
  ConvNet network(0, c10::kCPU);
  const std::vector<at::Tensor> targets = network->parameters();
  if (targets.size() != parameters.size()) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                           fmt::format("version {} has {} parameters; the network has {}", version,
                                       parameters.size(), targets.size()));
  }
  const c10::NoGradGuard off;
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i].copy_(parameters[i]);
  const std::lock_guard lock(mutex_);
  if (version > current_->number) current_ = std::make_shared<const Version>(Version{version, network});
}

}  // namespace fashion_mnist
