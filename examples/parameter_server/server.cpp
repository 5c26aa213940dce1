#include "parameter_server/server.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace parameter_server {
namespace {

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : parameters) copies.push_back(parameter.detach().clone());
  return copies;
}

/// Why gradients do not fit the parameters; empty if they do.
std::string mismatch(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& parameters) {
  if (gradients.size() != parameters.size())
    return fmt::format("{} gradients for {} parameters", gradients.size(), parameters.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || gradients[i].sizes() != parameters[i].sizes() ||
        gradients[i].scalar_type() != parameters[i].scalar_type())
      return fmt::format("gradient {} does not have the shape and type of its parameter", i);
  }
  return {};
}

}  // namespace

ParameterServerImpl::ParameterServerImpl(ServerOptions options)
    : options_(options), network_(options.seed), present_(options.trainers) {
  if (options.is_double) network_->to(at::kDouble);
  optimizer_.emplace(*network_, torchspan::optim::SGD{.lr = options.lr, .momentum = options.momentum});
  version_.parameters = copies_of(network_->parameters());
}

Version ParameterServerImpl::fetch() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

Statistics ParameterServerImpl::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void ParameterServerImpl::update(std::int64_t trainer, std::int64_t step, std::vector<at::Tensor> gradients,
                                 torchspan::Promise<Version> next) {
  std::unique_lock lock(mutex_);
  std::string problem = mismatch(gradients, version_.parameters);
  for (const Waiting& other : waiting_) {
    if (other.trainer == trainer) problem = "it already waits for a step";
  }
  if (!problem.empty()) {
    lock.unlock();
    next.set_error(std::make_exception_ptr(torchspan::Error(
        torchspan::ErrorKind::kInvalid, fmt::format("update of trainer {} rejected: {}", trainer, problem))));
    return;
  }
  waiting_.push_back({trainer, step, std::move(gradients), std::move(next)});
  lock.unlock();
  take_steps();
}

void ParameterServerImpl::leave() {
  {
    const std::lock_guard lock(mutex_);
    --present_;
  }
  take_steps();
}

void ParameterServerImpl::take_steps() {
  for (std::vector<Waiting> waiting = take_waiting(); !waiting.empty(); waiting = take_waiting()) {
    step(std::move(waiting));
    const std::lock_guard lock(mutex_);
    steps_ = false;
  }
}

std::vector<ParameterServerImpl::Waiting> ParameterServerImpl::take_waiting() {
  const std::lock_guard lock(mutex_);
  const std::int64_t needed = std::max<std::int64_t>(1, std::min(options_.wait_for, present_));
  if (steps_ || static_cast<std::int64_t>(waiting_.size()) < needed) return {};
  steps_ = true;
  std::vector<Waiting> taken(std::make_move_iterator(waiting_.begin()),
                             std::make_move_iterator(waiting_.begin() + needed));
  waiting_.erase(waiting_.begin(), waiting_.begin() + needed);
  return taken;
}

void ParameterServerImpl::step(std::vector<Waiting> waiting) {
  // The sum has the same order, and so the same bits, whoever came first.
  std::ranges::sort(waiting, {}, &Waiting::trainer);
  Version next;
  try {
    const std::vector<at::Tensor> parameters = network_->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor sum = waiting.front().gradients[i].clone();
      for (std::size_t other = 1; other < waiting.size(); ++other) sum += waiting[other].gradients[i];
      parameters[i].mutable_grad() = sum / static_cast<double>(waiting.size());
    }
    optimizer_->step();
    const std::lock_guard lock(mutex_);
    version_ = {version_.step + 1, copies_of(parameters)};
    ++statistics_.steps;
    statistics_.gradients += static_cast<std::int64_t>(waiting.size());
    for (const Waiting& one : waiting) statistics_.missed_steps += version_.step - 1 - one.step;
    next = version_;
  } catch (...) {
    for (Waiting& one : waiting) one.next.set_error(std::current_exception());
    return;
  }
  for (Waiting& one : waiting) one.next.set_value(next);
}

torchspan::Future<Version> update_and_fetch(torchspan::Worker& worker,
                                            const torchspan::RRef<ParameterServer>& server,
                                            std::int64_t trainer, std::int64_t step,
                                            const std::vector<at::Tensor>& gradients) {
  auto next = worker.make_promise<Version>();
  auto future = next.future();
  server.local_value()->update(trainer, step, gradients, std::move(next));
  return future;
}

}  // namespace parameter_server
