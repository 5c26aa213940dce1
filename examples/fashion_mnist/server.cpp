#include "fashion_mnist/server.h"

#include <chrono>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <torchspan/core/error.h>

namespace fashion_mnist {

ServerImpl::ServerImpl(const torchspan::Worker& worker, std::uint64_t seed)
    : current_(std::make_shared<const Version>(Version{0, ConvNet(seed, c10::kCPU)})),
      batcher_(worker, [this](const std::vector<at::Tensor>& calls) { return answer(calls); },
               {.max_size = 16, .max_delay = std::chrono::milliseconds(1), .max_waiting = 256}) {}

torchspan::Future<Answer> ServerImpl::classify(const at::Tensor& images) { return batcher_.add(images); }

std::vector<Answer> ServerImpl::answer(const std::vector<at::Tensor>& calls) const {
  std::shared_ptr<const Version> version;
  {
    const std::lock_guard lock(mutex_);
    version = current_;
  }
  std::vector<std::int64_t> counts;
  for (const at::Tensor& images : calls) counts.push_back(images.size(0));
  const c10::NoGradGuard off;
  const at::Tensor classes = version->network.ptr()->forward(at::cat(calls)).argmax(1);
  std::vector<Answer> answers;
  for (const at::Tensor& part : classes.split_with_sizes(counts))
    answers.push_back({version->number, part.clone()});
  return answers;
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

Server make_server(torchspan::Worker& worker, std::uint64_t seed) { return Server(worker, seed); }

}  // namespace fashion_mnist
