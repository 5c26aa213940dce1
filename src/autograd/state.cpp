#include "autograd/state.h"

#include <algorithm>
#include <fmt/format.h>

#include "autograd/pass.h"

namespace torchspan::autograd {

void ContextState::add_send(const std::shared_ptr<SendNode>& send) {
  MutexLock lock(mutex_);
  if (!released_) sends_.emplace(send->message().id, send);
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
  for (const auto& send : sends) remove_send(send->message().id);
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

void ContextSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (auto taken = context_.offer(parameter, gradient)) {
    hold(std::move(*taken));
  } else {
    context_.gradients().accumulate(parameter, std::move(gradient));
  }
}

bool ContextState::add_worker(std::uint32_t rank) {
  MutexLock lock(mutex_);
  if (released_) return false;
  workers_.insert(rank);
  return true;
}

std::set<std::uint32_t> ContextState::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

bool ContextState::is_first_of(std::uint64_t wave) {
  MutexLock lock(mutex_);
  if (std::find(waves_.begin(), waves_.end(), wave) != waves_.end()) return false;
  waves_.push_back(wave);
  if (waves_.size() > kWaves) waves_.pop_front();
  return true;
}

std::shared_ptr<PassState> ContextState::pass() const {
  MutexLock lock(mutex_);
  return pass_;
}

bool ContextState::begin_pass(const std::shared_ptr<PassState>& pass) {
  MutexLock lock(mutex_);
  const auto ended = ended_.find(maker_of(pass->id()));
  if (ended != ended_.end() && pass->id() <= ended->second.pass) {
    if (ended->second.pass == pass->id() && ended->second.failure) throw Error(*ended->second.failure);
    throw Error(ErrorKind::kCancelled, "this backward pass is over on this worker");
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

void ContextState::end_pass(std::uint64_t pass, const std::optional<Error>& failure) {
  std::shared_ptr<PassState> gone;
  MutexLock lock(mutex_);
  if (pass_ && pass_->id() == pass) gone = std::move(pass_);
  Ended& ended = ended_[maker_of(pass)];
  if (ended.pass < pass) ended = {pass, failure};
}

bool ContextState::release() {
  std::map<std::uint64_t, std::shared_ptr<SendNode>> gone;
  MutexLock lock(mutex_);
  gone.swap(sends_);
  return !std::exchange(released_, true);
}

}  // namespace torchspan::autograd
