#include "autograd/state.h"

#include <fmt/format.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/engine/stock_sink.h>

#include "autograd/pass.h"

namespace torchspan::autograd {

void ContextState::add_send(const std::shared_ptr<SendNode>& send) {
  MutexLock lock(mutex_);
  sends_.emplace(send->message(), send);
}

void ContextState::remove_send(std::uint64_t message) {
  std::shared_ptr<SendNode> gone;  // its graph is destroyed after the lock
  MutexLock lock(mutex_);
  auto it = sends_.find(message);
  if (it == sends_.end()) return;
  gone = std::move(it->second);
  sends_.erase(it);
}

std::shared_ptr<SendNode> ContextState::find_send(std::uint64_t message) const {
  MutexLock lock(mutex_);
  auto it = sends_.find(message);
  return it == sends_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<SendNode>> ContextState::sends() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<SendNode>> all;
  for (const auto& [message, send] : sends_) all.push_back(send);
  return all;
}

void ContextState::remove_sends(const std::vector<std::shared_ptr<SendNode>>& sends) {
  for (const auto& send : sends) remove_send(send->message());
}

void ContextState::add_taker(GradientTaker taker) {
  auto shared = std::make_shared<const GradientTaker>(std::move(taker));
  MutexLock lock(mutex_);
  takers_.push_back(std::move(shared));
}

std::optional<Future<void>> ContextState::offer(const at::Tensor& parameter, at::Tensor& gradient) const {
  std::vector<std::shared_ptr<const GradientTaker>> takers;
  {
    MutexLock lock(mutex_);
    takers = takers_;
  }
  for (const auto& taker : takers) {
    if (auto taken = (*taker)(parameter, gradient)) return taken;
  }
  return std::nullopt;
}

namespace {

/// A reducer would find no gradient where somebody took it.
void refuse_shared_gradient(const at::Tensor& parameter) {
  const auto leaf = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!leaf) return;
  for (const auto& hook : leaf->post_hooks()) {
    if (dynamic_cast<const engine::GradientHook*>(hook.get()) == nullptr) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the gradient of a parameter of shape {} is to be stepped in this pass, and to be "
                    "averaged by DistributedDataParallel: step after backward() instead",
                    c10::str(parameter.sizes())));
  }
}

}  // namespace

void ContextSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (auto taken = context_.offer(parameter, gradient)) {
    refuse_shared_gradient(parameter);
    hold(std::move(*taken));
  } else {
    context_.gradients().accumulate(parameter, std::move(gradient));
  }
}

void ContextState::add_worker(std::uint32_t rank) {
  MutexLock lock(mutex_);
  workers_.insert(rank);
}

std::set<std::uint32_t> ContextState::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

std::shared_ptr<PassState> ContextState::pass() const {
  MutexLock lock(mutex_);
  return pass_;
}

bool ContextState::begin_pass(const std::shared_ptr<PassState>& pass) {
  MutexLock lock(mutex_);
  if (auto it = aborted_.find(pass->id()); it != aborted_.end()) {
    throw Error(ErrorKind::kCancelled, fmt::format("the backward pass was aborted: {}", it->second));
  }
  if (released_) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("autograd context {:#x} was released; make a new Context for the "
                            "next step",
                            id_));
  }
  if (pass_) return false;
  pass_ = pass;
  return true;
}

void ContextState::end_pass(const PassState& pass) {
  std::shared_ptr<PassState> gone;
  MutexLock lock(mutex_);
  if (pass_.get() == &pass) gone = std::move(pass_);
}

void ContextState::remember_aborted(std::uint64_t pass, const std::string& reason) {
  MutexLock lock(mutex_);
  aborted_.emplace(pass, reason);
}

bool ContextState::release() {
  MutexLock lock(mutex_);
  return !std::exchange(released_, true);
}

}  // namespace torchspan::autograd
